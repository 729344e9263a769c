"""Report at the first step of what is whole on every rank: parameters that no compiled graph uses, and their states."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.whole_unit import whole_unit_of

from .ordinary import is_ordinary
from .parameter import ShardedParameter
from .unpartitioned import parameters_beside

_log = logging.getLogger("zinf_compile")

WARNED_SHARE = 0.1
"""The part of a model's bytes above which whole parameters are a warning."""


def report_whole(context: Context, optimizer: Optimizer, partitioned: Sequence[ShardedParameter]) -> None:
    """Log, on the first rank, how much of the model is not partitioned; a warning where that is much and costs memory."""
    costs = context.size > 1 or any(p._zinf_unit.backing or p._zinf_unit.placement.optimizer != Tier.DEVICE for p in partitioned)
    if context.rank != 0 or not (costs or _log.isEnabledFor(logging.INFO)):
        return
    rest, cut = parameters_beside(partitioned)
    if not rest or any(map(is_ordinary, rest.values())):  # graphs that partition nothing use some, and don't note which
        return
    of_model = sum(p._zinf_unit.bytes for p in cut) + sum(p.nbytes for p in rest.values())
    much = costs and sum(p.nbytes for p in rest.values()) > WARNED_SHARE * of_model
    _log.log(logging.WARNING if much else logging.INFO, "%s", whole_line(optimizer, rest, of_model, much=much))


def whole_line(optimizer: Optimizer, rest: Mapping[str, nn.Parameter], of_model: int, *, much: bool) -> str:
    """Write the line; `of_model` is the bytes of all of the model's parameters."""
    parameters = sum(p.nbytes for p in rest.values())
    states = dict.fromkeys((False, True), 0)
    for parameter in rest.values():
        states[whole_unit_of(parameter) is not None] += bytes_of_states(optimizer, parameter)
    largest = max(rest, key=lambda name: rest[name].nbytes)
    kept = [f"{parameters:,} B of parameters"]
    kept += [f"{states[True]:,} B of states, this rank's part of them"] if states[True] else []
    kept += [f"{states[False]:,} B of states"] if states[False] else []
    text = (
        f"no compiled graph uses {len(rest)} parameters, {parameters / max(1, of_model):.0%} of the model: they stay whole on "
        f"each rank ({', '.join(kept)}); the largest is {largest} ({rest[largest].nbytes:,} B)"
    )
    if much:
        text += ". To partition them too, compile the whole model rather than its blocks, or avoid the graph breaks around them"
    return text


def bytes_of_states(optimizer: Optimizer, parameter: nn.Parameter) -> int:
    """Return the bytes of an optimizer's states of a parameter on this rank, without counters."""
    state = optimizer.state.get(parameter, {})
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
