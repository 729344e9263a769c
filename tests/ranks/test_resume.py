"""Training on from a checkpoint is equal to the bit to the run that went on: with dropout, a scheduler, an averaged model and
two optimizers, saved between micro-batches or while a step is deferred."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_resume import resumed
from ranks import run_ranks
from torch.utils import _pytree as pytree

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "nvme": NVME,
    "nvme in tiles": {**NVME, "tile": 256},
}


def assert_equal(found: Any, expected: Any) -> None:
    ours, theirs = (dict(pytree.tree_flatten_with_path(value)[0]) for value in (found, expected))
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        where = pytree.keystr(path)
        if isinstance(value, torch.Tensor):
            assert ours[path].dtype == value.dtype, where
            assert torch.equal(ours[path].detach(), value.detach()), where
        else:
            assert ours[path] == value, where


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
