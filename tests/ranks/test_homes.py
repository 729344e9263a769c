"""Homes of their own for each parameter's values, gradient and states on two ranks: the same bits, collectives as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from marks import more
from rank_homes import train_mixtures, train_strays
from ranks import run_ranks

NEAR, FAR, BETWEEN = ("device",) * 3, ("nvme",) * 3, ("host", "nvme", "device")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("apart", [True, more(False)])
def test_bits_of_drawn_mixtures(apart: bool, tmp_path: Path) -> None:
    assert run_ranks(train_mixtures, 2, str(tmp_path), torch.float32, (5, 6), apart) == [2, 2]
    assert run_ranks(train_strays, 2, str(tmp_path), [NEAR, FAR, BETWEEN, NEAR], apart, None) == [4, 4]
