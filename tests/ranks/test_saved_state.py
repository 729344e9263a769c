"""Companions of parameters and random generators, saved by some ranks and loaded by as many, more and fewer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_saved_state import loaded, saved
from ranks import run_ranks

from zinf_compile.checkpoint.random_states import seed_of

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
def test_companions_and_generators_at_other_worlds(before: int, after: int, tmp_path: Path) -> None:
    away = {**dict.fromkeys(("params", "grads", "optimizer"), "nvme"), "nvme": str(tmp_path), "timeout_s": 60}
    places: list[dict[str, Any]] = [{"timeout_s": 60}, {**away, "tile": 2048}]
    by_rank = run_ranks(saved, before, str(tmp_path / "saved"), places[before == 3])
    found = run_ranks(loaded, after, str(tmp_path / "saved"), places[before == 2])
    assert by_rank[0][2] == 2, "they are partitioned"
    for rank, (averages, drawn, messages) in enumerate(found):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(averages, by_rank[0][0], strict=True))
        if rank == 0 and before != after:
            there = "ranks 0 to 1" if after > before else "rank 0"
            assert f"is of {before} ranks, loaded on {after}: random generators of {there} are as" in messages.pop(0)
        if rank < before:
            assert drawn == by_rank[rank][1]
            assert not messages
            continue
        seed = seed_of(100, rank)
        assert drawn == (torch.randn(3, generator=torch.Generator().manual_seed(seed)).tolist(), random.Random(seed).random())
        assert len(messages) == 1
        assert f"rank {rank}: the checkpoint is of {before} ranks" in messages[0]
    assert len({tuple(drawn[0]) for _, drawn, _ in found}) == after
