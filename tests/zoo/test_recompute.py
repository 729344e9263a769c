"""The models of the zoo with saved values that are made again: the bits of eager PyTorch."""

from __future__ import annotations

import pytest

from .architectures import ARCHITECTURES
from .building import case
from .train import train_without_fallback

FAST = ["swin", "mixtral"]


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.zoo) for name in ARCHITECTURES])
def test_an_architecture_trains_alike(name: str) -> None:
    row = ARCHITECTURES[name]
    train_without_fallback(case(name), as_aot_eager=bool(row.as_aot_eager), fullgraph=not row.breaks, activations="recompute")
