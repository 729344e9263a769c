"""Checkpoints that each rank writes and reads for itself: equal to the bit on any ranks, tiers and tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_checkpoint import bounded, loaded, saved
from ranks import run_ranks

pytestmark = pytest.mark.distributed

PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "states on a drive": {"optimizer": "nvme"},
    "all on a drive, in tiles": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "tile": 2048},
    "in memory, in the same tiles": {"tile": 2048},
    "in memory, in other tiles": {"tile": 1024},
}


def placed(place: str, folder: Path) -> dict[str, Any]:
    """Return the options of a place."""
    options = PLACES[place]
    return {**options, "timeout_s": 60} | ({"nvme": str(folder)} if "nvme" in options.values() else {})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "memory"), (1, "all on a drive, in tiles")),
        ((1, "all on a drive, in tiles"), (3, "states on a drive")),
        ((3, "all on a drive, in tiles"), (2, "memory")),
        ((1, "all on a drive, in tiles"), (1, "in memory, in the same tiles")),
        ((2, "memory"), (2, "states on a drive")),
        ((2, "all on a drive, in tiles"), (2, "in memory, in other tiles")),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_tiers_and_tiles_may_differ(before: tuple[int, str], after: tuple[int, str], tmp_path: Path) -> None:
    (model, optimizer), went_on = run_ranks(saved, before[0], str(tmp_path / "saved"), placed(before[1], tmp_path))[0]
    found, again = run_ranks(loaded, after[0], str(tmp_path / "saved"), placed(after[1], tmp_path))[0]
    torch.testing.assert_close(found, (model, optimizer), rtol=0, atol=0)
    if before[0] == after[0] and PLACES[before[1]].get("tile") == PLACES[after[1]].get("tile"):
        assert again == went_on
    else:
        assert again == pytest.approx(went_on, rel=1e-5), "the bound that docs/checkpoints.md states"
    (folder,) = (tmp_path / "saved").iterdir()
    read = {f"model.{name}": torch.empty_like(value) for name, value in model.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, value in model.items():
        assert torch.equal(read[f"model.{name}"], value), name


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_little_is_in_memory_and_nothing_comes_from_other_ranks(size: int, tmp_path: Path) -> None:
    options = {**placed("states on a drive", tmp_path), "params": "nvme", "grads": "nvme"}
    for saving, loading, own, received in run_ranks(bounded, size, str(tmp_path / "saved"), options, alone=True):
        assert own > 100 << 20
        assert saving < 80 << 20, "64 MiB in flight, and a thread"
        assert loading < 80 << 20
        assert received == 0
