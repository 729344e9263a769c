"""A folder announced for checkpoints, on several ranks: each reserves its own part, and an error on one is an error on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_announced import no_space_on_one, on_a_full_drive, other_folders, sizes
from ranks import run_ranks
from small_drives import MIB, small_drive

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def away(folder: Path) -> dict[str, Any]:
    return {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": str(folder)}


@pytest.mark.parametrize(("size", "place"), [(2, "drive"), (2, "memory"), pytest.param(3, "drive", marks=pytest.mark.thorough)])
def test_each_rank_reserves_its_part(size: int, place: str, tmp_path: Path) -> None:
    options = away(tmp_path) if place == "drive" else {}
    for expected, found in run_ranks(sizes, size, str(tmp_path / "saves"), options):
        for reserved, there in zip(expected, found, strict=True):
            assert 0 <= reserved - there <= 8 + 4096, "a number of which only a save knows that it is the same on all ranks"


def test_no_save_finds_the_drive_full(tmp_path: Path) -> None:
    with small_drive(tmp_path / "drive", 8 * MIB) as drive:
        results = run_ranks(on_a_full_drive, 2, str(drive), away(tmp_path), alone=True)  # lets go of the drive at once
    for rank, (errors, names, same) in enumerate(results):
        (error,) = errors
        assert error.startswith("OSError" if rank == 0 else "CheckpointError: no checkpoint is saved in"), error
        assert "2 checkpoints to keep and one that is written" in error
        assert "bytes more, and" in error
        assert names == ["save-00000003", "save-00000004"]
        assert same


def test_ranks_with_other_folders(tmp_path: Path) -> None:
    for rank, (names, nodes) in enumerate(run_ranks(other_folders, 2, str(tmp_path))):
        assert names.startswith("OptionError: the ranks are not doing the same thing"), names
        assert "checkpoint=" in names
        assert ("" if rank == 1 else "named on rank 1: ") + "rank 1 doesn't find in" in nodes
        assert "one folder that all ranks see" in nodes


def test_a_quota_of_one_rank(tmp_path: Path) -> None:
    for rank, (error, held, after) in enumerate(run_ranks(no_space_on_one, 2, str(tmp_path))):
        assert error.startswith("OSError" if rank == 1 else "CheckpointError: no checkpoint is saved in"), error
        assert "Disk quota exceeded: the quota is used up" in error
        assert not held
        assert after
