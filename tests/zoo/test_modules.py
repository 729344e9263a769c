"""Every trainable module of torch.nn trains on one process as eager does, bit by bit, captured whole."""

from __future__ import annotations

import pytest
import torch

from .modules import AS_AOT_EAGER, DYNAMO, SKIPPED, entries, module_name
from .train import train_without_fallback

FAST = [
    "BatchNorm2d-0", "Bilinear-0", "Conv2d-0", "ConvTranspose2d-0", "Embedding-0", "GRUCell-0", "GroupNorm-0", "LayerNorm-0",
    "LazyConv1d-0", "Linear-0", "LSTM-0", "MultiheadAttention-0", "PReLU-0", "RMSNorm-0",
]  # fmt: skip
ENTRIES = [name for name in entries() if name not in SKIPPED]


@pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored:UserWarning")
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.zoo) for name in ENTRIES])
def test_a_module_trains(name: str) -> None:
    module = module_name(name)
    with torch._dynamo.config.patch(DYNAMO.get(module, {})):
        train_without_fallback(entries()[name], as_aot_eager=module in AS_AOT_EAGER)


def test_every_module_is_trained_in_some_way() -> None:
    assert {module_name(name) for name in ENTRIES} == {module_name(name) for name in entries()}


def test_few_ways_are_skipped() -> None:
    assert set(SKIPPED) <= set(entries())
    assert all(SKIPPED.values())
    assert len(SKIPPED) <= 0.05 * len(entries())


def test_eager_bits_are_the_rule() -> None:
    assert set(AS_AOT_EAGER) <= {module_name(name) for name in ENTRIES}
    assert set(FAST) <= set(ENTRIES)
