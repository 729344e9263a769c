"""Homes of their own for each parameter's values, gradient and states on two ranks: the same bits, collectives as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from rank_homes import train_mixtures, train_strays, train_within
from ranks import run_ranks

NEAR, FAR, BETWEEN = ("device",) * 3, ("nvme",) * 3, ("host", "nvme", "device")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("apart", [True, more(False)])
def test_bits_of_drawn_mixtures(apart: bool, tmp_path: Path) -> None:
    assert run_ranks(train_mixtures, 2, str(tmp_path), torch.float32, (5, 6), apart) == [2, 2]
    assert run_ranks(train_strays, 2, str(tmp_path), [NEAR, FAR, BETWEEN, NEAR], apart, None) == [4, 4]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("given", [{}, more({"planner": "cached_prefetch"})])
def test_homes_that_follow_from_caps(given: dict[str, Any], tmp_path: Path) -> None:
    *kinds, one = run_ranks(train_within, 2, str(tmp_path), (700_000, 1_000_000, 4 << 20), given)[0]
    assert max(kinds) > 1 == one
