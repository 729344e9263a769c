"""Parameters in tiles wherever their states live, over ranks, and larger than what may be in memory."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from marks import more
from rank_tiling import Huge, grow_beyond_memory, live_in_tiles, train_batches, train_beyond_the_cap, train_in_tiles_of_ranks
from ranks import run_ranks
from tiers import PLACEMENTS, UNIFIED, UNIFIED_PAIRS, Placement

FAKE = pytest.param(True, marks=pytest.mark.tiers)
"""On a device with memory of its own: all placements."""


@pytest.mark.parametrize(
    ("fake", "placements"),
    [(False, UNIFIED_PAIRS), pytest.param(True, PLACEMENTS, marks=pytest.mark.tiers)],
    ids=["unified", "fake"],
)
def test_tiles_anywhere(fake: bool, placements: list[Placement], tmp_path: Path) -> None:
    count = train_in_tiles_of_ranks(0, 1, str(tmp_path), torch.float32, "fx", fake=fake, placements=placements)
    assert count == len(placements)


@pytest.mark.tiers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", ["fx", "inductor"])
def test_tiles_of_any_type_anywhere(compute: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert train_in_tiles_of_ranks(0, 1, str(tmp_path), dtype, compute, fake=False) == 8


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("placements", [UNIFIED_PAIRS, pytest.param(UNIFIED, marks=pytest.mark.tiers)], ids=["pairs", "all"])
def test_tiles_over_two_ranks(placements: list[Placement], tmp_path: Path) -> None:
    call = functools.partial(train_in_tiles_of_ranks, dtype=torch.float32, compute="fx", fake=False, placements=placements)
    assert run_ranks(call, 2, str(tmp_path)) == [len(placements)] * 2


@pytest.mark.tiers
@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_tiles_anywhere_over_ranks(size: int, tmp_path: Path) -> None:
    call = functools.partial(train_in_tiles_of_ranks, dtype=torch.float32, compute="fx", fake=True)
    assert run_ranks(call, size, str(tmp_path)) == [27] * size


@pytest.mark.slow
@pytest.mark.parametrize("fake", [False, more(True)])
def test_a_weight_of_eight_times_what_the_device_may_hold(fake: bool, tmp_path: Path) -> None:
    (losses,) = run_ranks(functools.partial(train_beyond_the_cap, fake=fake), 1, str(tmp_path))  # alone: all models count
    torch.manual_seed(0)
    eager = Huge()
    torch.testing.assert_close(losses, train_batches(eager, seed=0, rows=2), rtol=1e-5, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_weight_of_eight_times_what_the_process_gains(size: int, tmp_path: Path) -> None:
    for gained, cap in run_ranks(grow_beyond_memory, size, str(tmp_path), afresh=True):
        assert gained <= cap, f"{gained:,} bytes more than before the model was made, {cap:,} allowed"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("fake", [False, FAKE])
def test_the_same_on_two_ranks(fake: bool, tmp_path: Path) -> None:
    one, other = run_ranks(functools.partial(train_beyond_the_cap, fake=fake), 2, str(tmp_path))
    assert one != other


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_born_saved_and_loaded_in_tiles(tier: str, tmp_path: Path) -> None:
    live_in_tiles(0, 1, str(tmp_path), tier)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_born_saved_and_loaded_in_tiles_on_ranks(tier: str, tmp_path: Path) -> None:
    run_ranks(live_in_tiles, 3, str(tmp_path), tier)
