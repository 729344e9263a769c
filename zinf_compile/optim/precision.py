"""States in fp32 of parameters in 16 bits: kept as they are where PyTorch would round them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.parameter import ShardedParameter

SHORT = (torch.bfloat16, torch.float16)
_loading: weakref.WeakKeyDictionary[Optimizer, Mapping[Any, Mapping[str, Any]]] = process_wide(weakref.WeakKeyDictionary())
_keeping: weakref.WeakSet[Optimizer] = process_wide(weakref.WeakSet())
_warned: weakref.WeakSet[Optimizer] = process_wide(weakref.WeakSet())


def keep_precision(optimizer: Optimizer) -> None:
    """Let `optimizer.load_state_dict` keep states in the data type in which they were saved.

    PyTorch rounds every state to its parameter's type: with bf16 parameters and `master="float32"` the precision of moments and
    master copies would be lost. From an optimizer's first step on this is so by itself; call it to load before that.
    """
    if optimizer not in _keeping:
        _keeping.add(optimizer)
        optimizer.register_load_state_dict_pre_hook(_before_load)
        optimizer.register_load_state_dict_post_hook(_after_load)


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    _loading[optimizer] = state_dict.get("state", {})


def _after_load(optimizer: Optimizer) -> None:
    loaded = _loading.pop(optimizer, {})
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, value in loaded.get(index, {}).items():
            wider = isinstance(value, torch.Tensor) and value.dtype not in SHORT and value.is_floating_point()
            if wider and parameter.dtype in SHORT:
                optimizer.state[parameter][name] = value.detach().to(optimizer.state[parameter][name].device, copy=True)


def warn_of_rounding(optimizer: Optimizer, parameter: ShardedParameter, kept: Mapping[str, torch.dtype]) -> None:
    """Warn where states were loaded that PyTorch has rounded."""
    state = optimizer.state[parameter]
    rounded = [name for name, dtype in kept.items() if name in state and state[name].dtype in SHORT and dtype not in SHORT]
    if rounded and optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            f"states {', '.join(rounded)} of this {type(optimizer).__name__} are in {parameter.dtype}: PyTorch's load_state_dict "
            "rounds them to the parameters' type. Call zinf_compile.keep_precision(optimizer) before load_state_dict",
            stacklevel=2,
        )


def warn_of_short_updates(optimizer: Optimizer, parameters: list[ShardedParameter]) -> None:
    """Warn, once, of a model whose 16-bit parameters are updated in 16 bits, or that has a master copy of nothing."""
    if optimizer in _warned:
        return
    trained = [p for p in parameters if p.requires_grad]
    short = [p for p in trained if p.dtype in SHORT and p._zinf_unit.placement.master is None]
    if short and len(short) == len(trained):
        _warned.add(optimizer)
        warnings.warn(
            f"all {len(short)} parameters are {short[0].dtype} and updated in that precision: small updates are rounded away. "
            'options={"master": "float32"} updates them in fp32, in a copy kept with the optimizer\'s states',
            stacklevel=2,
        )
    for p in trained:
        unit = p._zinf_unit
        if unit.placement.master is not None and not any(other.dtype in SHORT for other in unit.context.units):
            _warned.add(optimizer)
            warnings.warn(
                f'option master="float32" does nothing: no parameter is bf16 or fp16; {unit.name}, for one, is {unit.dtype} and '
                "updated in that precision anyway. Leave the option away, or convert the model, as model.bfloat16() does, before "
                "its first compiled call",
                stacklevel=2,
            )
            break
