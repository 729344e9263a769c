"""Keeps fp32 states of 16-bit parameters in fp32 where `load_state_dict` would round them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.arguments import check_optimizer
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import MASTER
from .elementwise_probe import states_kept
from .record import record_of
from .state_entry import states_of

SHORT = (torch.bfloat16, torch.float16)
_WARNED = "precision"


def keep_precision(optimizer: Optimizer) -> None:
    """Let `optimizer.load_state_dict` keep states in the data type in which they were saved.

    PyTorch rounds every state to its parameter's type: with bf16 parameters and `master="float32"` the precision of moments and
    master copies would be lost. The first step of an optimizer enables this by itself; call it to load before that.
    """
    check_optimizer(optimizer)
    record = record_of(optimizer)
    if not record.keeps_precision:
        record.keeps_precision = True
        optimizer.register_load_state_dict_pre_hook(_before_load)
        optimizer.register_load_state_dict_post_hook(_after_load)


def drop_masters(optimizer: Optimizer, *, whole: bool = False) -> None:
    """Round states that were loaded with master copies to the types that are kept without, where a placement has none.

    They were loaded before their parameter was partitioned, when that was not known yet. `whole`: no parameter of the optimizer
    is partitioned, and those of all are rounded.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else None
            state = states_of(optimizer, parameter) if whole or unit is not None else None
            if type(state) is dict and MASTER in state and keeps_no_master(optimizer, group, parameter.dtype, unit):
                types = states_kept(optimizer, group, parameter.dtype)
                kept = {name: value for name, value in state.items() if name != MASTER}
                optimizer.state[parameter] = {n: v.to(types[n]) if n in types else v for n, v in kept.items()}


def keeps_no_master(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, unit: Unit | None) -> bool:
    """Return whether a parameter has no master copy, be it its placement's or one that the optimizer keeps itself, so named.

    `unit`: how it is partitioned; None: it is not.
    """
    placed = unit is not None and unit.placement.master_of(dtype) is not None
    return not placed and MASTER not in states_kept(optimizer, group, dtype)


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    record_of(optimizer).loading = state_dict.get("state", {})


def _after_load(optimizer: Optimizer) -> None:
    record = record_of(optimizer)
    loaded, record.loading = record.loading or {}, None
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, value in loaded.get(index, {}).items():
            wider = isinstance(value, torch.Tensor) and value.dtype not in SHORT and value.is_floating_point()
            if wider and parameter.dtype in SHORT:
                optimizer.state[parameter][name] = value.detach().to(optimizer.state[parameter][name].device, copy=True)


def warn_of_rounding(optimizer: Optimizer, parameter: ShardedParameter, kept: Mapping[str, torch.dtype]) -> None:
    """Warn of states that were made without master copies, or that PyTorch has rounded when they were loaded."""
    state = optimizer.state[parameter]
    rounded = [name for name, dtype in kept.items() if name in state and state[name].dtype in SHORT and dtype not in SHORT]
    if rounded and _WARNED not in record_of(optimizer).warned:
        record_of(optimizer).warned.add(_WARNED)
        warnings.warn(
            f"states {', '.join(rounded)} of this {type(optimizer).__name__} are in {parameter.dtype}, and go on in "
            f"{kept[rounded[0]]}: they were made without master copies, or PyTorch's load_state_dict has rounded them to the "
            "parameters' type. Call zinf_compile.keep_precision(optimizer) before load_state_dict",
            stacklevel=2,
        )


def warn_of_short_updates(optimizer: Optimizer, parameters: list[ShardedParameter]) -> None:
    """Warn, once, of a model whose 16-bit parameters are updated in 16 bits, or whose option `master` applies to no parameter."""
    if _WARNED in record_of(optimizer).warned:
        return
    if not any(p._zinf_unit.dtype in SHORT or p._zinf_unit.placement.master for p in parameters):
        return
    units = [p._zinf_unit for p in parameters if p.requires_grad]
    short = [unit for unit in units if unit.dtype in SHORT and unit.placement.master is None]
    if short and len(short) == len(units):
        record_of(optimizer).warned.add(_WARNED)
        warnings.warn(
            f"all {len(short)} parameters are {short[0].dtype} and updated in that precision: small updates are rounded away. "
            'options={"master": "float32"} updates them in fp32, in a copy kept with the optimizer\'s states',
            stacklevel=2,
        )
    for unit in units:
        if unit.placement.master is not None and not any(other.dtype in SHORT for other in unit.context.units):
            record_of(optimizer).warned.add(_WARNED)
            warnings.warn(
                f'option master="float32" does nothing: no parameter is bf16 or fp16; {unit.name}, for one, is {unit.dtype} and '
                "updated in that precision anyway. Omit the option, or convert the model, as model.bfloat16() does, before "
                "its first compiled call",
                stacklevel=2,
            )
            break
