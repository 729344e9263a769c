"""The examples, as the README has them run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_fine_tuning_what_was_fine_tuned(tmp_path: Path) -> None:
    """By the plain loop from a config, then by the Trainer from what that saved; plain transformers loads both."""
    command = [
        sys.executable,
        str(ROOT / "examples" / "finetune_hf.py"),
        "--nvme",
        str(tmp_path),
        "--steps",
        "3",
        "--batch",
        "2",
        "--length",
        "64",
    ]
    first, second = tmp_path / "first", tmp_path / "second"
    for arguments in (["--output", str(first)], ["--output", str(second), "--model", str(first), "--trainer"]):
        run = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert "in 3 steps" in run.stdout
    one, other = (hf.AutoModelForCausalLM.from_pretrained(folder) for folder in (first, second))
    changed = [name for name, value in one.state_dict().items() if not value.equal(other.state_dict()[name])]
    assert len(changed) == len(one.state_dict()), "all were trained on"


@pytest.mark.tiers
def test_a_gpt_trains_to_the_same_losses_from_a_drive(tmp_path: Path) -> None:
    """As `make train` runs it, but for the model's size."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    sizes = ["--steps", "3", "--batch", "2", "--length", "32", "--layers", "1", "--width", "64"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # so small a model gains by no other
    losses = []
    for name, tiers in {"memory": [], "drive": ["--nvme", str(tmp_path), "--device-memory", "256MiB"]}.items():
        file = tmp_path / name
        command = [
            sys.executable,
            str(ROOT / "examples" / "train_gpt.py"),
            *sizes,
            "--text",
            str(text),
            "--losses",
            str(file),
            *tiers,
        ]
        run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=alone)
        assert run.returncode == 0, run.stderr
        assert "in 3 steps" in run.stdout
        assert ("parameters on NVMe" in run.stderr) == (name == "drive"), run.stderr
        losses.append([float(line) for line in file.read_text().splitlines()])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert losses[0][2] < losses[0][0]
