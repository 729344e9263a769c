"""The modules of torch.nn that have parameters, built and called in the ways of PyTorch's own tests."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from models import Case
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_leaves

# That import forbids everybody to set flags of torch.backends; other tests may want to.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

MOST_WAYS = 4
"""Ways to build and call one module, evenly spread over those of PyTorch's tests, which have hundreds for some."""

_CAUSAL = "nn.TransformerEncoder branches on whether its mask's values are a causal one's: Dynamo leaves the layer to eager"
_AVERAGE = "momentum=None divides by the number of batches so far, which Dynamo can't read: it leaves the layer to eager"

SKIPPED = {
    "BatchNorm2d-1": _AVERAGE,
    "BatchNorm3d-1": _AVERAGE,
    "TransformerEncoder-2": _CAUSAL,
    "Transformer-2": _CAUSAL,
    "Transformer-3": _CAUSAL,
}

AS_AOT_EAGER = {
    "LSTM": "AOTAutograd decomposes the LSTM, which eager runs in one fused kernel",
}
"""Modules whose eager bits differ from aot_eager's, and why; aot_eager's are the ones to meet."""

DYNAMO: dict[str, dict[str, Any]] = {
    "RNN": {"allow_rnn": True},
    "GRU": {"allow_rnn": True},
    "LSTM": {"allow_rnn": True},
    "LinearCrossEntropyLoss": {"reorderable_logging_functions": {warnings.warn}},
}
"""Settings without which Dynamo leaves a module to eager PyTorch."""


class Squared(nn.Module):
    """Calls a module; the sum of the mean squares of all that it returns is to shrink."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        outputs = [leaf for leaf in tree_leaves(self.module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        return torch.stack([output.square().mean() for output in outputs]).sum()


@functools.cache
def entries() -> dict[str, Case]:
    """Return {"Linear-0": its case, ...} for each trainable module, at most `MOST_WAYS` of each."""
    found: dict[str, Case] = {}
    for info in module_db:
        torch.manual_seed(0)
        ways = _ways(info)
        trainable = [way for way in ways if any(parameter.requires_grad for parameter in _build(info, way).parameters())]
        for number, way in enumerate(spread(trainable)):
            found[f"{module_name(info.name)}-{number}"] = _case(info, way)
    return found


def module_name(entry: str) -> str:
    """Return the module's name without its namespace and the number of a way: "nn.Linear-0" is "Linear"."""
    return entry.removeprefix("nn.").partition("-")[0]


def spread(ways: list[ModuleInput]) -> list[ModuleInput]:
    """Return the first, the last, and ways evenly in between."""
    last = MOST_WAYS - 1
    return [ways[place] for place in sorted({round(step * (len(ways) - 1) / last) for step in range(MOST_WAYS)})] if ways else []


def _ways(info: ModuleInfo) -> list[ModuleInput]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")  # advice on the arguments
        return list(info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True))


def _build(info: ModuleInfo, way: ModuleInput) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")  # advice on the arguments
        module: nn.Module = info.module_cls(*way.constructor_input.args, **way.constructor_input.kwargs)
    return module


def _case(info: ModuleInfo, way: ModuleInput) -> Case:
    call = way.forward_input

    def build() -> nn.Module:
        module = _build(info, way)
        if isinstance(module, LazyModuleMixin):
            module(*call.args, **call.kwargs)  # makes its parameters, which optimizers and copies want
        return Squared(module)

    return Case(build, lambda step, rank=0: (call.args, call.kwargs))
