"""Where states live changes no bit, and moves the bytes it must and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_tiers import train_everywhere, train_without_a_device
from ranks import run_ranks
from tiers import PLACEMENTS

STEPS = 20

FLOAT, BRAIN = torch.float32, torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
@pytest.mark.parametrize("compute", ["fx", "inductor"])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=["fp32", "bf16"])
def test_the_bits_of_all_on_the_device(dtype: torch.dtype, compute: str, ranks: int, tmp_path: Path) -> None:
    """Loss, parameters and states after 20 steps; bytes over each link at every step."""
    assert run_ranks(train_everywhere, ranks, str(tmp_path), dtype, compute, STEPS) == [len(PLACEMENTS)] * ranks


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "master"), [(FLOAT, None), (BRAIN, "float32")], ids=["fp32", "bf16"])
def test_wherever_parameters_are_updated(dtype: torch.dtype, master: str | None, tmp_path: Path) -> None:
    """Three chunks of two pieces: what is in memory is never read again."""
    (count,) = run_ranks(train_everywhere, 1, str(tmp_path), dtype, "fx", 3, ("host", "device"), 8192, master)
    assert count == 2 * len(PLACEMENTS)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=["fp32", "bf16"])
def test_where_the_device_is_host_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    assert run_ranks(train_without_a_device, 2, str(tmp_path), dtype, "fx", 5) == [8, 8]
