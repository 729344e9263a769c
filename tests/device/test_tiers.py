"""Where states live changes no bit on a device either, and moves the bytes it must and no more; see tests/tiers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from rank_late import on_device
from rank_row_rounds import SHAPES, look_up_anywhere
from rank_tiers import train_everywhere
from rank_tiling import train_in_tiles_of_ranks
from ranks import run_ranks
from tiers import PAIRS, PLACEMENTS, Placement

FLOAT, BRAIN = torch.float32, torch.bfloat16
RANKS = [1, pytest.param(2, marks=pytest.mark.distributed)]


def run_on_device(ranks: int, *args: Any) -> list[Any]:
    """Call `on_device`: of a single rank in this process."""
    return [on_device(0, 1, *args)] if ranks == 1 else run_ranks(on_device, ranks, *args, backend="late")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("dtype", "placements", "steps"),
    [(FLOAT, PAIRS, 2), more(FLOAT, PLACEMENTS, 4), more(BRAIN, PLACEMENTS, 4)],
    ids=["fp32-pairs", "fp32", "bf16"],
)
def test_the_bits_of_the_cpu(ranks: int, dtype: torch.dtype, placements: list[Placement], steps: int, tmp_path: Path) -> None:
    """Loss, parameters and states after some steps; bytes over each link at every step."""
    options = (str(tmp_path), dtype, "fx", steps, (None,), 96, None, None, placements)
    assert run_on_device(ranks, 1, train_everywhere, *options) == [len(placements)] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("placements", [PAIRS[::3], more(PLACEMENTS)], ids=["few", "all"])
def test_tiles_anywhere(ranks: int, placements: list[Placement], tmp_path: Path) -> None:
    """Of large parameters, and lookups in one of them."""
    call = functools.partial(train_in_tiles_of_ranks, dtype=FLOAT, compute="fx", fake=False, placements=placements)
    assert run_on_device(ranks, 1, call, str(tmp_path)) == [len(placements)] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("every", [False, more(True)])
def test_rows_of_tiles(ranks: int, every: bool, tmp_path: Path) -> None:
    shapes = SHAPES if every else SHAPES[:2]
    counts = run_on_device(ranks, 1, functools.partial(look_up_anywhere, shapes=shapes, every=every), str(tmp_path))
    assert min(counts) >= len(shapes)
