"""The examples, as the README has them run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_fine_tuning_what_was_fine_tuned(tmp_path: Path) -> None:
    """By the plain loop from a config, then by the Trainer from what that saved; plain transformers loads both."""
    command = [sys.executable, str(ROOT / "examples" / "finetune_hf.py"), "--nvme", str(tmp_path), "--steps", "3"]
    first, second = tmp_path / "first", tmp_path / "second"
    for arguments in (["--output", str(first)], ["--output", str(second), "--model", str(first), "--trainer"]):
        run = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert "in 3 steps" in run.stdout
    one, other = (hf.AutoModelForCausalLM.from_pretrained(folder) for folder in (first, second))
    changed = [name for name, value in one.state_dict().items() if not value.equal(other.state_dict()[name])]
    assert len(changed) == len(one.state_dict()), "all were trained on"
