"""Optimizers that work through others: only these are probed and stepped on shards, and nothing is stepped twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from stepped_pairs import Pair
from training import assert_same
from twin_models import whole
from wrapping_optimizers import WRAPPERS, train

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


def _loss(model: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(*vectors(number))
    return loss


@pytest.mark.parametrize("tier", ["device", "nvme"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_it_trains_as_in_eager(name: str, tier: str, drive: Path) -> None:
    pair = Pair(drive, tier=tier, build=Mlp, train=False)
    losses = [train(model, WRAPPERS[name](model.parameters()), _loss) for model in pair.models]
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]
    for one, other in zip(*(model.parameters() for model in pair.models), strict=True):
        assert_same("parameter", one.detach(), whole(other.detach()))
