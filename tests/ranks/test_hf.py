"""`zinf_compile.hf.adopt`: transformers' Trainer and accelerate with partitioned models."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import accelerate
import pytest
import rank_generation
import rank_hf
from marks import more
from rank_full_optimizer import ALL_ON_DRIVE, placed
from ranks import run_ranks
from torch import nn

import zinf_compile
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.hf.accelerator import adopt_accelerator

PLACES = ["compiled whole", "partitioned on a drive"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("place", PLACES)
def test_the_trainer_trains_as_with_ddp_and_resumes_bit_by_bit(place: str, tmp_path: Path) -> None:
    options = placed(ALL_ON_DRIVE, str(tmp_path)) if place == PLACES[1] else None
    run_ranks(rank_hf.trained_and_resumed, 2, str(tmp_path), options)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_trainer_in_one_process_resumes_bit_by_bit(tmp_path: Path) -> None:
    run_ranks(rank_hf.trained_and_resumed, 1, str(tmp_path), placed(ALL_ON_DRIVE, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("place", [more(PLACES[0]), PLACES[1]])
def test_an_accelerator_trains_as_with_ddp_and_resumes_bit_by_bit(place: str, tmp_path: Path) -> None:
    options = placed(ALL_ON_DRIVE, str(tmp_path)) if place == PLACES[1] else None
    run_ranks(rank_hf.bare_accelerator, 2, str(tmp_path), options)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_file_and_its_states_belong_together(tmp_path: Path) -> None:
    run_ranks(rank_hf.stopped_between, 2, str(tmp_path), placed(ALL_ON_DRIVE, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_trainer_that_generates_evaluates_as_plain_models_do(tmp_path: Path) -> None:
    run_ranks(rank_generation.generated_while_training, 2, str(tmp_path), {})


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"given a torch.*Linear; accepted: a transformers.Trainer, or an accelerate.Accelerator"):
        zinf_compile.hf.adopt(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"given a builtins\.int"):
        zinf_compile.hf.adopt(3)
    sharded = types.SimpleNamespace(distributed_type=accelerate.DistributedType.FSDP)
    with pytest.raises(UnsupportedModelError, match=r"set up for FSDP.*Launch without its plugin"):
        adopt_accelerator(sharded)


def test_neither_library_is_imported_with_the_package() -> None:
    code = "import sys, zinf_compile; print([n for n in ('accelerate', 'transformers', 'zinf_compile.hf') if n in sys.modules])"
    code += "; zinf_compile.hf.adopt"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
