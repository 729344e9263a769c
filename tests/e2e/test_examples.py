"""The examples, as the README has them run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as hf
from example_ranks import run_on_ranks
from marks import more
from paths import ROOT


def three_steps(example: str, *arguments: str, folder: Path, env: dict[str, str] | None = None, ranks: int = 1) -> str:
    """Run an example for three steps; return what it says."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(ROOT / "examples" / example), "--steps", "3", "--batch", "2", *arguments]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=env)
    assert run.returncode == 0, run.stderr
    assert "in 3 steps" in run.stdout
    return run.stdout


@pytest.mark.slow
@pytest.mark.thorough  # two programs that compile: the next test runs one of them, on two ranks
def test_fine_tuning_what_was_fine_tuned(tmp_path: Path) -> None:
    """By the plain loop from a config, then by the Trainer from what that saved; plain transformers loads both."""
    common = ["--nvme", str(tmp_path), "--length", "64"]
    first, second = tmp_path / "first", tmp_path / "second"
    for arguments in (["--output", str(first), "--layers", "2"], ["--output", str(second), "--model", str(first), "--trainer"]):
        three_steps("finetune_hf.py", *common, *arguments, folder=tmp_path)
    one, other = (hf.AutoModelForCausalLM.from_pretrained(folder) for folder in (first, second))
    changed = [name for name, value in one.state_dict().items() if not value.equal(other.state_dict()[name])]
    assert len(changed) == len(one.state_dict()), "all were trained on"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("launched", [False, more(True)], ids=["forked", "by torchrun"])
def test_the_trainer_on_two_ranks(launched: bool, tmp_path: Path) -> None:
    """As the README has it, but for the model's size; plain transformers loads what is saved."""
    small, tuned = tmp_path / "small", tmp_path / "tuned"
    config = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.LlamaForCausalLM(hf.LlamaConfig(**config, use_cache=False)).save_pretrained(small)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    arguments = ["--nvme", str(tmp_path), "--length", "16", "--model", str(small), "--output", str(tuned), "--trainer"]
    if launched:
        three_steps("finetune_hf.py", *arguments, folder=tmp_path, env=env, ranks=2)
    else:
        program = ROOT / "examples" / "finetune_hf.py"
        assert "in 3 steps" in run_on_ranks(program, ["--steps", "3", "--batch", "2", *arguments], 2, tmp_path)
    one, other = (hf.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (small, tuned))
    assert [name for name, value in one.items() if value.equal(other[name])] == []


@pytest.mark.tiers
def test_a_gpt_trains_to_the_same_losses_from_a_drive(tmp_path: Path) -> None:
    """As `make train` runs it, but for the model's size: a line for each stage, and a picture."""
    pytest.importorskip("matplotlib")
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog; it sleeps.\n" * 100)
    sizes = ["--length", "32", "--layers", "1", "--width", "64"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # so small a model gains by no other
    losses = []
    for name, tiers in {"memory": [], "drive": ["--nvme", str(tmp_path), "--device-memory", "256MiB"]}.items():
        file = tmp_path / name
        files = ["--text", str(text), "--losses", str(file), "--picture", str(tmp_path / f"{name}.png")]
        said = three_steps("train_gpt.py", *sizes, *files, *tiers, folder=tmp_path, env=alone)
        stages = [line.partition(":")[0] for line in said.splitlines()]
        assert stages[:7] == ["model", "plan", "memory", "speed", "loss", "picture", "writes"], said
        assert ("'s drive" in said) == (", nvme " in said) == (name == "drive"), said
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        losses.append([float(line) for line in file.read_text().splitlines()])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert losses[0][2] < losses[0][0]
