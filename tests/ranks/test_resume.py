"""Training on from a checkpoint is equal to the bit to the run that went on: with dropout, a scheduler, an averaged model and
two optimizers, saved between micro-batches or while a step is deferred."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_resume import loaded_generators, resumed, saved_generators
from ranks import run_ranks
from same_leaves import assert_equal

from zinf_compile.checkpoint.random_states import seed_of

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "nvme": NVME,
    "nvme in tiles": {**NVME, "tile": 256},
}


@pytest.mark.parametrize(
    ("size", "place", "done"),
    [
        (1, "memory", 2),
        (1, "nvme", 2),
        (1, "nvme in tiles", 0),
        (2, "memory", 2),
        (2, "nvme", 1),
        (2, "nvme in tiles", 2),
        (2, "nvme", 0),
    ],
)
def test_it_equals_the_run_that_went_on(size: int, place: str, done: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {**PLACES[place], "timeout_s": 60}
    options |= {"nvme": str(tmp_path)} if "nvme" in place else {}
    results = run_ranks(resumed, size, str(tmp_path / "saved"), options, done)
    for saved, loaded, went_on, again, calls, pending in results:
        assert_equal(loaded, saved)
        assert_equal(again, went_on)
        assert any(grad is not None for grad in loaded["gradients"].values()) == (done > 0)
        assert pending == ("nvme" in place), "a step that is deferred is saved as it will be"
        assert calls == 2, "a buffer that is not persistent stays as it is"
    if size > 1:
        assert not torch.equal(results[0][1]["random"][0], results[1][1]["random"][0]), "each rank draws its own numbers"


def test_generators_of_ranks_that_exist_are_kept_and_others_seeded(tmp_path: Path) -> None:
    saved = run_ranks(saved_generators, 2, str(tmp_path / "saved"))
    fewer = run_ranks(loaded_generators, 1, str(tmp_path / "saved"))
    (line,) = fewer[0][3]
    assert line.endswith(
        "save-00000001 is of 2 ranks, loaded on 1: random generators of rank 0 are as they were saved, those of rank 1 are left "
        "out"
    )
    assert_equal(fewer[0], (*saved[0], [line]))
    more = [run_ranks(loaded_generators, 3, str(tmp_path / "saved")) for _ in range(2)]
    assert_equal(more[0], more[1])
    (line,) = more[0][0][3]
    assert line.endswith(
        "is of 2 ranks, loaded on 3: random generators of ranks 0 to 1 are as they were saved, those of rank 2 are seeded from "
        "the seed 0 and the rank"
    )
    assert_equal(more[0][0], (*saved[0], [line]))
    assert_equal(more[0][1], (*saved[1], []))
    (line,) = more[0][2][3]
    expected = seed_of(0, 2)
    assert f"rank 2: the checkpoint is of 2 ranks; random generators are seeded with {expected}, from the seed 0 and" in line
    torch.manual_seed(expected)
    assert torch.equal(more[0][2][0], torch.rand(3))
    assert more[0][2][2] == np.random.RandomState(expected % (1 << 32)).rand()
