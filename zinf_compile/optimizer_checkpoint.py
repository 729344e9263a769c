"""Whole states of an optimizer: gathered on rank 0 to be saved, spread over the ranks when they are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ._torch import tree_leaves, tree_map
from .birth import together
from .chunk_plan import MASTER
from .errors import BudgetError, UnsupportedOptimizerError
from .limits import host_room_bytes
from .parameter import unit_of
from .probe import states_kept
from .runtime.context import Context
from .runtime.unit import Unit
from .runtime.whole import gather_on_first, scatter_whole
from .shard_state import kept_state, shard_state
from .state_layout import LAYOUT, noted, without_note
from .streamed import absorb_loaded
from .streaming import torn

_ABSORBED_BYTES = 64 << 20
"""Of states that are loaded before they go to their tier together: what is small shares a chunk with others."""


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Stands for a state that rank 0 has, in what the others are told."""

    shape: torch.Size
    dtype: torch.dtype


def full_optimizer_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return eager's `optimizer.state_dict()`, on the host of rank 0, with whole states; other ranks get an empty one.

    A collective operation. States have the shapes of their parameters, so that it loads into the same optimizer of the plain
    model, and by `load_full_optimizer_state_dict` on any number of ranks, under any tiers and tiles. Needs host memory for all
    states on rank 0, and on every rank for its own shards of them, which come into memory as for `optimizer.state_dict()`; raises
    `BudgetError` where there is less.
    """
    units = _units(optimizer)
    context = next((unit.context for unit in units if unit is not None), None)
    if context is None:
        return _copied(optimizer.state_dict(), optimizer)
    with together(context, "saving the optimizer"):
        given = optimizer.state_dict()
        states = {key: without_note(state) if isinstance(state, Mapping) else state for key, state in given.pop("state").items()}
        gathered = dict(_large(states, units))
        _reject_nested(optimizer, states, units)
        shards = {(key, name): shard_state(states[key][name], unit, name, optimizer) for (key, name), unit in gathered.items()}
        whole = sum(unit.numel * shards[place].element_size() for place, unit in gathered.items())
        held = _held(optimizer)
        brought = sum(shards[key, name].nbytes for key, name in gathered if id(states[key][name]) not in held)  # and let go of
        if context.rank == 0 and (room := host_room_bytes(context)) < whole - brought:
            raise BudgetError(
                f"the whole states of this {type(optimizer).__name__} take {whole:,} bytes of host memory on rank 0; {room:,} "
                f"are available, and {brought:,} that become free. Save each rank's own, by optimizer.state_dict(), or give "
                "rank 0 more memory (option host_memory, where it is given)"
            )
    _agree_on_order(
        units, context, "saving the optimizer", [f"{n} of {u.name} {shards[k, n].dtype}" for (k, n), u in gathered.items()]
    )
    for (key, name), unit in gathered.items():
        states[key][name] = None  # the shard goes once it is gathered
        states[key][name] = _on_first(unit, shards.pop((key, name)), f"gathering state {name} of {unit.name} on rank 0")
    return _copied({"state": states, **given}, optimizer) if context.rank == 0 else {}


def load_full_optimizer_state_dict(optimizer: Optimizer, state: Mapping[str, Any] | None) -> None:
    """Load what `full_optimizer_state_dict` returned, or a plain optimizer's `state_dict()`; only rank 0's `state` is read.

    A collective operation, for a partitioned model: after its first compiled call or `partition`. Groups, parameters and shapes
    are checked before anything changes; every mismatch is named, on all ranks. Each rank is given its own shards, in memory of
    its own, one parameter at a time, in the types in which this optimizer keeps them.
    """
    units = _units(optimizer)
    context = next((unit.context for unit in units if unit is not None), None)
    if context is None:
        if state is None:
            _raise_for(optimizer, ["none was given, and nothing is partitioned yet: then each rank needs one"])
        optimizer.load_state_dict(dict(state or {}))
        return
    first = context.rank == 0
    _agree_on_order(units, context, "loading the optimizer", [str([len(group["params"]) for group in optimizer.param_groups])])
    with together(context, "loading the optimizer"):
        problems = _mismatches(optimizer, units, state) if first else []
        plan = _plan(state) if first and state is not None and not problems else {}
    _raise_for(optimizer, context.share(problems, what="loading the optimizer: does the state fit"))
    plan = context.share(plan, what="loading the optimizer")
    for key, unit in enumerate(units):
        if unit is not None and unit.placement.master_of(unit.dtype) is None:
            plan["state"].get(key, {}).pop(MASTER, None)  # the parameter is updated itself here
    given = state["state"] if first and state is not None else {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    large = dict(_large(plan["state"], units))
    small = {
        key: {
            name: _same(given.get(key, {}).get(name), kept, context) for name, kept in names.items() if (key, name) not in large
        }
        if isinstance(names, Mapping)
        else names
        for key, names in plan["state"].items()
    }
    torn[optimizer] = f"loading the states of {type(optimizer).__name__} ended in its middle: load them again"
    optimizer.load_state_dict({**plan, "param_groups": _like(plan["param_groups"], optimizer), "state": small})
    torn[optimizer] = f"loading the states of {type(optimizer).__name__} ended in its middle: load them again"
    groups, waiting = {id(p): group for group in optimizer.param_groups for p in group["params"]}, 0
    for key, parameter in enumerate(parameters):
        unit, names = units[key], plan["state"].get(key)
        if unit is None or not names:
            continue
        types = states_kept(optimizer, groups[id(parameter)], unit.placement.master_of(unit.dtype) or unit.dtype)
        loaded = optimizer.state[parameter]
        for name, kept in names.items():
            if (key, name) in large:
                value = _spread(unit, given.get(key, {}).get(name), kept, name)
                value = value.to(unit.device if unit.placement.optimizer == "device" else "cpu", types.get(name, kept.dtype))
                loaded[name] = kept_state(value, unit)
                waiting += value.nbytes
            elif isinstance(kept, _Tensor) and isinstance(loaded.get(name), torch.Tensor):  # PyTorch may have rounded it
                loaded[name] = small[key][name].to(loaded[name].device, types.get(name, kept.dtype), copy=True)
        optimizer.state[parameter] = noted(loaded, unit)
        if waiting >= _ABSORBED_BYTES:
            absorb_loaded(optimizer)
            waiting = 0
    absorb_loaded(optimizer)
    torn.pop(optimizer, None)


def _units(optimizer: Optimizer) -> list[Unit | None]:
    """Return the units of an optimizer's parameters in the order in which a state dict numbers them; None: not partitioned."""
    return [unit_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _large(states: Mapping[Any, Any], units: list[Unit | None]) -> Iterator[tuple[tuple[int, str], Unit]]:
    """Yield where states of a partitioned parameter's size are, (its number, name), in an order that all ranks have."""
    for key, unit in enumerate(units):
        for name, value in sorted(states.get(key, {}).items()) if unit is not None else ():
            shape = value.shape if isinstance(value, torch.Tensor | _Tensor) else ()
            if unit is not None and shape and (shape.numel() != 1 or unit.numel == 1 or unit.shard_numel == 1):
                yield (key, name), unit


def _agree_on_order(units: list[Unit | None], context: Context, what: str, more: list[str]) -> None:
    """Check that all ranks mean the same parameters by the same numbers."""
    named = [f"parameter {i} is {'whole' if unit is None else f'unit {unit.serial}'}" for i, unit in enumerate(units)]
    context.agree([*named, *more], what=what)


def _reject_nested(optimizer: Optimizer, states: Mapping[Any, Any], units: list[Unit | None]) -> None:
    for key, unit in enumerate(units):
        for name, value in states.get(key, {}).items() if unit is not None else ():
            if not isinstance(value, torch.Tensor) and any(isinstance(v, torch.Tensor) and v.dim() for v in tree_leaves(value)):
                raise UnsupportedOptimizerError(
                    f"state {name!r} of {type(optimizer).__name__} is a {type(value).__name__} of tensors: a rank has its own "
                    "shards of these, and only states that are tensors can be gathered. Save optimizer.state_dict() on each rank"
                )


def _copied(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a state dict whose tensors are on the host and nobody else's; takes over what the optimizer doesn't hold."""
    held = _held(optimizer)

    def copied(value: Any) -> Any:
        return value.detach().to("cpu", copy=id(value) in held) if isinstance(value, torch.Tensor) else value

    states = {
        key: tree_map(copied, dict(entry) if isinstance(entry, Mapping) else entry) for key, entry in state["state"].items()
    }
    groups = tree_map(lambda v: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v, state["param_groups"])
    return {**state, "state": states, "param_groups": groups}


def _held(optimizer: Optimizer) -> set[int]:
    """Return the identities of what is in `optimizer.state`."""
    return {id(value) for entry in optimizer.state.values() for value in tree_leaves(entry)}


def _on_first(unit: Unit, shard: torch.Tensor, what: str) -> torch.Tensor | None:
    """Gather one state whole on rank 0's host."""
    context = unit.context
    full = context.full_buffer(unit.numel, shard.dtype, unit.device) if context.rank == 0 else None
    with torch.no_grad():
        gather_on_first(unit, shard.to(unit.device), full, what)
    return None if full is None else unit.logical(full).to("cpu")


def _spread(unit: Unit, value: torch.Tensor | None, kept: _Tensor, name: str) -> torch.Tensor:
    """Return this rank's part of rank 0's value."""
    with torch.no_grad():
        full = None if value is None else unit.flat(value.detach().to(unit.device))
        shard = torch.empty(unit.shard_numel, dtype=kept.dtype, device=unit.device)
        scatter_whole(unit, full, shard, f"loading state {name} of {unit.name}")
    return shard


def _same(value: Any, kept: Any, context: Context) -> Any:
    """Return a copy of rank 0's value of what is not partitioned."""
    if not isinstance(kept, _Tensor):
        return kept
    with torch.no_grad():
        whole = torch.empty(kept.shape, dtype=kept.dtype, device=context.device)
        if value is not None:
            whole.copy_(value)
        context.finish(context.gather_lane.submit(lambda: context.gathers.broadcast(whole)), "loading the optimizer")
        return whole.to("cpu")


def _like(groups: list[dict[str, Any]], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return groups whose settings that are tensors, as rates may be, are where this optimizer has them."""

    def like(value: Any, present: Any) -> Any:
        both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
        return value.to(present.device) if both else value

    rows = zip(groups, optimizer.param_groups, strict=True)
    return [{name: like(value, mine.get(name)) for name, value in theirs.items()} for theirs, mine in rows]


def _plan(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with a description in place of each state that is a tensor."""

    def described(value: Any) -> Any:
        return _Tensor(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value

    def on_host(value: Any) -> Any:
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    states = {
        key: {name: described(value) for name, value in entry.items()} if isinstance(entry, Mapping) else entry
        for key, entry in state["state"].items()
    }
    return {**state, "state": states, "param_groups": tree_map(on_host, state["param_groups"])}


def _mismatches(optimizer: Optimizer, units: list[Unit | None], state: Mapping[str, Any] | None) -> list[str]:
    if state is None:
        return ["rank 0 was given no state"]
    missing = [key for key in ("state", "param_groups") if key not in state]
    if missing:
        return [f"it has no {key!r}" for key in missing]
    found = [len(group["params"]) for group in state["param_groups"]]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if found != wanted:
        return [f"groups of {found} parameters in the state, of {wanted} in the optimizer"]
    problems = [
        f"the states of {unit.name} are one rank's own ({LAYOUT}): that rank loads them by load_state_dict"
        for key, unit in enumerate(units)
        if unit is not None and LAYOUT in state["state"].get(key, {})
    ]
    return problems or [
        f"shape of state {name!r} of {unit.name}: {list(value.shape)} in the state, {list(unit.shape)} in the model"
        for (key, name), unit in _large(state["state"], units)
        if tuple((value := state["state"][key][name]).shape) != unit.shape
    ]


def _raise_for(optimizer: Optimizer, problems: list[str]) -> None:
    if problems:
        raise UnsupportedOptimizerError(
            f"the state doesn't fit this {type(optimizer).__name__}; nothing was changed. {'; '.join(problems)}"
        )
