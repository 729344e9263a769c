"""Jobs that share a folder, and jobs that are killed: nothing is met there, nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import SUPPORT

TRAINS = """
import signal, sys, warnings
import torch
from tiers import compiled, options_for, sundry, train_step
from training import adamw
import zinf_compile
from zinf_compile.runtime.units import pieces

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background lets its children ignore it
warnings.simplefilter("ignore")
torch.set_num_threads(1)
pieces.PIECE_NUMEL = 96
folder, steps = sys.argv[1], int(sys.argv[2])
model = compiled(sundry(), options_for(("nvme",) * 3, folder))
optimizer = adamw(model.parameters())
for step in range(steps):
    losses = train_step(model, optimizer, step % 10)
    if step in (0, 9):
        print(losses, flush=True)
"""


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", TRAINS, str(folder), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def losses_of(job: subprocess.Popen[str]) -> str:
    out, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    return out


@pytest.mark.slow
def test_jobs_in_one_folder_and_after_one_that_was_killed(tmp_path: Path) -> None:
    """Two at once, with the same losses as each alone; then one that is killed in the middle, and another after it."""
    together = [start(tmp_path, 10) for _ in range(2)]
    losses = {losses_of(job) for job in together}
    assert len(losses) == 1
    killed = start(tmp_path, 1_000_000)
    assert killed.stdout is not None
    assert killed.stdout.readline(), "it has taken a step"
    time.sleep(0.2)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert os.listdir(tmp_path) == []
    assert {losses_of(start(tmp_path, 10))} == losses
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_an_interrupt_from_the_keyboard_ends_a_job(tmp_path: Path) -> None:
    job = start(tmp_path, 1_000_000)
    assert job.stdout is not None
    assert job.stdout.readline(), "it has taken a step"
    try:
        for _ in range(30):  # Python drops an interrupt that arrives in a callback of its garbage collector
            job.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(timeout=2)
                break
    finally:
        job.kill()
    _, errors = job.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert job.returncode in (1, -signal.SIGINT, 130), errors
    assert os.listdir(tmp_path) == []
