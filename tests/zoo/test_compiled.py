"""Models that others wrote train with compiled regions as in eager PyTorch, within rounding."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from .architectures import ARCHITECTURES
from .building import case
from .train import train_without_fallback

COMPILED = ["gpt_neox", "modernbert", "bart", "deit", "convnext", "whisper", "clip", "qwen3_moe", "lfm2"]
"""One of each kind."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer that doesn't enlarge a gradient's rounding, as Adam's first steps do."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.zoo) for name in COMPILED])
def test_an_architecture_trains_compiled(name: str) -> None:
    row = ARCHITECTURES[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Inductor can't compile")
        alive = train_without_fallback(case(name), fullgraph=not row.breaks, compute="inductor", optimizer=sgd)
    assert alive > 0.5
