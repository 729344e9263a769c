"""`zinf_compile.dcp_state_dict`: `dcp.save` and `dcp.load` of partitioned models, by others' own loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_dcp
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "states": {"optimizer": "nvme"},
    "tiles": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "tile": 2048},
}


def placed(place: str, folder: Path) -> dict[str, Any]:
    """Return the options of a place."""
    return {**PLACES[place], **({"nvme": str(folder)} if place != "memory" else {}), "timeout_s": 60}


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, "tiles"), (2, "memory")), ((2, "tiles"), (1, "states")), ((2, "memory"), (2, "tiles")), ((2, "tiles"), (3, "tiles"))],
)
def test_loaded_elsewhere(before: tuple[int, str], after: tuple[int, str], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    whole, losses = run_ranks(rank_dcp.saved, before[0], str(folder), placed(before[1], tmp_path))[0]
    for fresh in (False, True):
        found, continued = run_ranks(rank_dcp.loaded, after[0], str(folder), placed(after[1], tmp_path), fresh)[0]
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
        if before == after:
            assert continued == losses
    read = {f"model.{name}": torch.empty_like(value) for name, value in whole[0].items()}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    for name, value in whole[0].items():
        assert torch.equal(read[f"model.{name}"], value), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_little_is_in_memory_at_once(ranks: int, tmp_path: Path) -> None:
    for most, total in run_ranks(rank_dcp.little_in_memory, ranks, str(tmp_path / "saved"), placed("tiles", tmp_path)):
        assert 0 < most <= 4096, "a part has 256 bytes"
        assert total > 8 * most


def test_a_load_that_fails(tmp_path: Path) -> None:
    run_ranks(rank_dcp.broken, 1, str(tmp_path / "saved"), placed("tiles", tmp_path))


@pytest.mark.parametrize(("ranks", "place"), [(1, "tiles"), (2, "memory")])
def test_parameters_without_states(ranks: int, place: str, tmp_path: Path) -> None:
    run_ranks(rank_dcp.half_used, ranks, str(tmp_path), placed(place, tmp_path))


def test_one_ranks_own_states_are_refused(tmp_path: Path) -> None:
    run_ranks(rank_dcp.own_states, 2, str(tmp_path))
