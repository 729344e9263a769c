"""Jobs that share a folder, and jobs that are killed: nothing is met there, nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from forking import start_forked
from paths import SUPPORT
from tier_job import train

INTERRUPTED = """
import signal, sys
from tier_job import train

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background lets its children ignore it
train(sys.argv[1], 1_000_000)
"""


def start(folder: Path, steps: int) -> tuple[Any, Connection]:
    """Start a job, forked from a process that has imported the libraries; return it, and where it says its losses."""
    here, there = mp.Pipe(duplex=False)
    job = start_forked(train, str(folder), steps, there)
    there.close()
    return job, here


def losses_of(job: Any, said: Connection) -> tuple[float, ...]:
    """Return the losses of a job's first and tenth step, once it has ended."""
    losses = [loss for _ in range(2) for loss in said.recv()]
    job.join(timeout=120)
    assert job.exitcode == 0
    return tuple(losses)


@pytest.mark.slow
def test_jobs_in_one_folder_and_after_one_that_was_killed(tmp_path: Path) -> None:
    """Two at once, with the same losses as each alone; then one that is killed in the middle, and another after it."""
    together = [start(tmp_path, 10) for _ in range(2)]
    losses = {losses_of(*job) for job in together}
    assert len(losses) == 1
    killed, said = start(tmp_path, 1_000_000)
    assert said.recv(), "it has taken a step"
    time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(timeout=60)
    assert killed.exitcode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    assert {losses_of(*start(tmp_path, 10))} == losses
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_an_interrupt_from_the_keyboard_ends_a_job(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
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
