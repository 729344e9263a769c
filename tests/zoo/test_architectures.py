"""Models that others wrote train on one process as eager PyTorch trains them, bit by bit."""

from __future__ import annotations

import collections
import typing

import pytest

from .architectures import ARCHITECTURES, SKIPPED, Kind
from .building import case
from .train import train_without_fallback

FAST = ["gpt_neox", "modernbert", "bart", "deit", "convnext", "whisper", "clip", "qwen3_moe", "lfm2"]


# What Dynamo says about code that it can trace and does.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.zoo) for name in ARCHITECTURES])
def test_an_architecture_trains(name: str) -> None:
    row = ARCHITECTURES[name]
    alive = train_without_fallback(case(name), as_aot_eager=bool(row.as_aot_eager), fullgraph=not row.breaks)
    assert alive > 0.5


def test_architectures_of_every_kind_are_trained() -> None:
    kinds = collections.Counter(row.kind for row in ARCHITECTURES.values())
    assert sum(kinds.values()) >= 50
    assert all(kinds[kind] >= 5 for kind in typing.get_args(Kind))


def test_few_architectures_are_skipped() -> None:
    assert not set(SKIPPED) & set(ARCHITECTURES)
    assert all(SKIPPED.values())
    assert len(SKIPPED) <= 0.05 * (len(SKIPPED) + len(ARCHITECTURES))


def test_the_fast_ones_are_of_every_kind() -> None:
    assert {ARCHITECTURES[name].kind for name in FAST} == set(typing.get_args(Kind))
