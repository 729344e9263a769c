"""Models that others wrote train with every matrix in tiles, and their losses in chunks, as in eager PyTorch, within rounding."""

from __future__ import annotations

import pytest

from .architectures import ARCHITECTURES, WORDS
from .building import rounded_little
from .test_compiled import sgd
from .train import train_without_fallback

FAST = ["gpt2", "llama"]

TILE = 1024
"""Bytes; a row of these models has at most a quarter of that."""


TRAINED = [name if name in FAST else pytest.param(name, marks=pytest.mark.zoo) for name in ARCHITECTURES]


# What Dynamo says about code that it can trace and does.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", TRAINED)
def test_an_architecture_trains_in_tiles(name: str) -> None:
    row = ARCHITECTURES[name]
    alive = train_without_fallback(
        rounded_little(name),
        as_aot_eager=bool(row.as_aot_eager),
        fullgraph=not row.breaks,
        optimizer=sgd,
        chunk_loss=True,
        chunk_bytes=4 * WORDS * 7,
        tile=TILE,
    )
    assert alive > 0.5
