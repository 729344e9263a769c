"""Ranks that are killed while they train and save: who goes on from what is left equals the run that was never killed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rank_killed import KEPT, MOST, STEPS, Kill, seeded, trained
from ranks import run_ranks
from same_leaves import assert_equal

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def options_in(folder: Path, *, announced: bool = False) -> dict[str, Any]:
    """Return options with everything on a drive, and updates of many chunks; `announced`: the folder of the checkpoints."""
    (folder / "drive").mkdir(parents=True)
    placed: dict[str, Any] = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "compute_shape": {"piece_numel": 64}}
    placed |= {"checkpoint": str(folder / "saved"), "checkpoint_keep": KEPT} if announced else {}
    return {**placed, "nvme": str(folder / "drive"), "timeout_s": 20}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return _uninterrupted(tmp_path_factory.mktemp("uninterrupted"), averaged=True)


@pytest.fixture(scope="module")
def uninterrupted_alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of the model without its average."""
    return _uninterrupted(tmp_path_factory.mktemp("alone"), averaged=False)


def _uninterrupted(folder: Path, *, averaged: bool) -> list[Any]:
    return run_ranks(trained, 2, str(folder / "saved"), options_in(folder), None, averaged)


def killed(kill: Kill, options: dict[str, Any], folder: Path, *, averaged: bool = True) -> None:
    """Train until the kill; a rank that isn't killed ends, too."""
    with pytest.raises(AssertionError, match="exit code -9") as ended:
        run_ranks(trained, 2, str(folder / "saved"), options, kill, averaged, alone=True)
    told = str(ended.value)
    assert "gave no answer" not in told
    assert all(f"rank {rank}:" in told for rank in range(2))
    assert len(re.findall("exit code -9", told)) == (2 if kill.all_ranks else 1)
    assert kill.all_ranks or f"RankMismatchError: rank {1 - kill.rank} of 2 got no answer from another rank while" in told


def check_rest(uninterrupted: list[Any], options: dict[str, Any], folder: Path, *, averaged: bool = True) -> None:
    """Go on to the end, and compare states, losses, and what is left on the drive."""
    results = run_ranks(trained, 2, str(folder / "saved"), options, None, averaged)
    for (states, losses), (expected_states, expected_losses) in zip(results, uninterrupted, strict=True):
        assert_equal(states, expected_states)
        assert losses == expected_losses[len(expected_losses) - len(losses) :]
    left = sorted(path.name for path in (folder / "saved").iterdir())
    assert left == [f"save-{number:08}" for number in range(STEPS // 2 - KEPT + 1, STEPS // 2 + 1)]
    assert not list((folder / "drive").iterdir())


def test_killed_at_one_point_after_the_other(uninterrupted: list[Any], tmp_path: Path) -> None:
    options = options_in(tmp_path, announced=True)
    for kill in (
        Kill("rename", 0, 2, under_way=False, all_ranks=False),  # as the first checkpoint gets its name
        Kill("cleanup", 0, 1, under_way=True, all_ranks=False),
        Kill("fsync", 0, 15, under_way=True, all_ranks=True),
        Kill("deferred", 1, 10, under_way=False, all_ranks=False),
        Kill("data", 1, 10, under_way=True, all_ranks=False),
    ):
        killed(kill, options, tmp_path)
    check_rest(uninterrupted, options, tmp_path)


def test_killed_while_the_thread_of_a_save_has_no_space_yet(uninterrupted_alone: list[Any], tmp_path: Path) -> None:
    options = options_in(tmp_path)
    for kill in (
        Kill("space", 1, 2, under_way=False, all_ranks=False),
        Kill("space", 0, 3, under_way=True, all_ranks=False),
    ):
        killed(kill, options, tmp_path, averaged=False)
    check_rest(uninterrupted_alone, options, tmp_path, averaged=False)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("point", MOST)
def test_killed_at_twenty_moments_of_each(
    point: str, seed: int, uninterrupted: list[Any], uninterrupted_alone: list[Any], tmp_path: Path
) -> None:
    kill, options, averaged = seeded(point, seed), options_in(tmp_path, announced=seed % 2 == 0), point != "space"
    print(f"seed {seed}: {kill}")
    killed(kill, options, tmp_path, averaged=averaged)
    check_rest(uninterrupted if averaged else uninterrupted_alone, options, tmp_path, averaged=averaged)
