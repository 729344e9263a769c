"""Ranks that are killed while they train and save: who goes on from what is left equals the run that was never killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_killed import KEPT, MOST, STEPS, seeded, trained
from ranks import run_ranks
from same_leaves import assert_equal

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def options_in(folder: Path) -> dict[str, Any]:
    (folder / "drive").mkdir(parents=True)
    placed = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
    return {**placed, "nvme": str(folder / "drive"), "timeout_s": 20}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return run_ranks(trained, 2, str(folder / "saved"), options_in(folder), None)


def check(point: str, seed: int, uninterrupted: list[Any], folder: Path) -> None:
    kill, options = seeded(point, seed), options_in(folder)
    print(f"seed {seed}: {kill}")
    with pytest.raises(AssertionError, match="exit code -9") as ended:
        run_ranks(trained, 2, str(folder / "saved"), options, kill, alone=True)
    assert "gave no answer" not in str(ended.value), "the other rank ends, too"
    assert f"rank {1 - kill.rank}:" in str(ended.value)
    results = run_ranks(trained, 2, str(folder / "saved"), options, None)
    for result, expected in zip(results, uninterrupted, strict=True):
        assert_equal(result, expected)
    left = sorted(path.name for path in (folder / "saved").iterdir())
    assert left == [f"save-{number:08}" for number in range(STEPS // 2 - KEPT + 1, STEPS // 2 + 1)]
    assert not list((folder / "drive").iterdir())


@pytest.mark.parametrize("point", MOST)
def test_killed_at_a_point(point: str, uninterrupted: list[Any], tmp_path: Path) -> None:
    check(point, 0, uninterrupted, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("point", MOST)
def test_killed_at_twenty_moments_of_each(point: str, seed: int, uninterrupted: list[Any], tmp_path: Path) -> None:
    check(point, seed, uninterrupted, tmp_path)
