"""Whole states of an optimizer: gathered on rank 0 to be saved, spread over the ranks when they are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import UnsupportedOptimizerError
from .parameter import ShardedParameter
from .precision import keep_precision
from .runtime.context import Context
from .runtime.unit import Unit
from .runtime.whole import gather_on_first, scatter_whole
from .shard_state import shard_state
from .state_layout import LAYOUT, noted, without_note

_States = dict[Any, dict[str, Any]]
"""By number of the parameter, as in a state dict; an optimizer may keep more, under keys of its own."""


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Stands for a state that rank 0 has, in what the others are told."""

    shape: torch.Size
    dtype: torch.dtype


def full_optimizer_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return eager's `optimizer.state_dict()`, on the host of rank 0, with whole states; other ranks get an empty one.

    A collective operation. States have the shapes of their parameters, so that it loads into the same optimizer of the plain
    model, and by `load_full_optimizer_state_dict` on any number of ranks, under any tiers and tiles. Rank 0 needs host memory for
    all states, every rank for its own shards of them, as for `optimizer.state_dict()`.
    """
    parameters, context = _parameters(optimizer), _context_of(optimizer)
    if context is None:
        return _copied(optimizer.state_dict())
    given: dict[str, Any] = {}
    try:
        given = optimizer.state_dict()
    finally:
        fails = not given
        failed = context.agree(["has every rank its state_dict"], what="saving the optimizer", value=float(fails))
    if any(failed):
        raise UnsupportedOptimizerError(
            f"state_dict() of {type(optimizer).__name__} failed on rank {failed.index(1.0)}, see there; nothing was saved"
        )
    states: _States = {index: without_note(state) for index, state in given["state"].items()}
    gathered = {
        (index, name): parameter._zinf_unit
        for index, parameter in enumerate(parameters)
        for name, value in sorted(states.get(index, {}).items())
        if isinstance(parameter, ShardedParameter) and isinstance(value, torch.Tensor) and value.dim()
    }
    context.agree(
        [f"gathering state {name} of {unit.name}, {states[index][name].dtype}" for (index, name), unit in gathered.items()],
        what="saving the optimizer",
    )
    for (index, name), unit in gathered.items():
        shard = shard_state(states[index][name], unit, name, optimizer)
        states[index][name] = _on_first(unit, shard, f"gathering state {name} of {unit.name} on rank 0")
    return _copied({**given, "state": states}) if context.rank == 0 else {}


def load_full_optimizer_state_dict(optimizer: Optimizer, state: Mapping[str, Any] | None) -> None:
    """Load what `full_optimizer_state_dict` returned, or a plain optimizer's `state_dict()`; only rank 0's `state` is read.

    A collective operation, for a partitioned model: after its first compiled call or `partition`. Groups, parameters and shapes
    are checked before anything changes; every mismatch is named, on all ranks. Each rank is given its own shards; states keep
    the data type in which they were saved.
    """
    parameters, context = _parameters(optimizer), _context_of(optimizer)
    first = context is None or context.rank == 0
    problems = _mismatches(optimizer, parameters, state) if first else []
    if context is None:
        _raise_for(optimizer, problems)
        assert state is not None
        keep_precision(optimizer)
        optimizer.load_state_dict(dict(state))
        return
    _raise_for(optimizer, context.share(problems, what="loading the optimizer: does the state fit"))
    plan: dict[str, Any] = context.share(_plan(state) if state is not None else {}, what="loading the optimizer")
    local: _States = {}
    for index, names in plan["state"].items():
        unit = _unit_of(parameters, index)
        given = state["state"][index] if state is not None and first else {}
        local[index] = {
            name: _spread(unit, given.get(name), kept, name, context) if isinstance(kept, _Tensor) else kept
            for name, kept in names.items()
        }
        if unit is not None:
            local[index] = noted(local[index], unit)
    keep_precision(optimizer)
    optimizer.load_state_dict({**plan, "state": local})


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in the order in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unit_of(parameters: list[nn.Parameter], index: Any) -> Unit | None:
    parameter = parameters[index] if index in range(len(parameters)) else None
    return parameter._zinf_unit if isinstance(parameter, ShardedParameter) else None


def _context_of(optimizer: Optimizer) -> Context | None:
    """Return what the ranks share, None where there is one rank or nothing is partitioned."""
    units = [p._zinf_unit for p in _parameters(optimizer) if isinstance(p, ShardedParameter)]
    return units[0].context if units and units[0].context.size > 1 else None


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors are on the host and nobody else's."""

    def copied(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    states = {index: {name: copied(value) for name, value in entry.items()} for index, entry in state["state"].items()}
    groups = [{name: copied(value) for name, value in group.items()} for group in state["param_groups"]]
    return {**state, "state": states, "param_groups": groups}


def _on_first(unit: Unit, shard: torch.Tensor, what: str) -> torch.Tensor | None:
    """Gather one state whole on rank 0's host."""
    context = unit.context
    full = context.full_buffer(unit.numel, shard.dtype, unit.device) if context.rank == 0 else None
    with torch.no_grad():
        gather_on_first(unit, shard.to(unit.device), full, what)
    return None if full is None else unit.logical(full).to("cpu")


def _spread(unit: Unit | None, value: torch.Tensor | None, kept: _Tensor, name: str, context: Context) -> torch.Tensor:
    """Return this rank's part of rank 0's value, on the host; of what is not partitioned a copy."""
    with torch.no_grad():
        if unit is None or not kept.shape:
            whole = torch.empty(kept.shape, dtype=kept.dtype, device=context.device)
            if value is not None:
                whole.copy_(value)
            what = f"loading state {name}"
            context.finish(context.gather_lane.submit(lambda: context.gathers.broadcast(whole)), what)
            return whole.to("cpu")
        full = None if value is None else unit.flat(value.detach().to(unit.device))
        shard = torch.empty(unit.shard_numel, dtype=kept.dtype, device=unit.device)
        scatter_whole(unit, full, shard, f"loading state {name} of {unit.name}")
        return shard.to("cpu")


def _plan(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with a description in place of each state that is a tensor."""

    def described(value: Any) -> Any:
        return _Tensor(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value

    states = {index: {name: described(value) for name, value in entry.items()} for index, entry in state["state"].items()}
    return {**state, "state": states}


def _mismatches(optimizer: Optimizer, parameters: list[nn.Parameter], state: Mapping[str, Any] | None) -> list[str]:
    if state is None:
        return ["rank 0 was given no state; and where nothing is partitioned yet, each rank needs one"]
    missing = [key for key in ("state", "param_groups") if key not in state]
    if missing:
        return [f"it has no {key!r}" for key in missing]
    found = [len(group["params"]) for group in state["param_groups"]]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if found != wanted:
        return [f"groups of {found} parameters in the state, of {wanted} in the optimizer"]
    problems = []
    for index, entry in state["state"].items():
        unit = _unit_of(parameters, index)
        if unit is None:
            continue
        if LAYOUT in entry:
            problems.append(f"the states of {unit.name} are one rank's own ({LAYOUT}): that rank loads them by load_state_dict")
            continue
        problems += [
            f"shape of state {name!r} of {unit.name}: {list(value.shape)} in the state, {list(unit.shape)} in the model"
            for name, value in entry.items()
            if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != unit.shape
        ]
    return problems


def _raise_for(optimizer: Optimizer, problems: list[str]) -> None:
    if problems:
        raise UnsupportedOptimizerError(
            f"the state doesn't fit this {type(optimizer).__name__}; nothing was changed. {'; '.join(problems)}"
        )
