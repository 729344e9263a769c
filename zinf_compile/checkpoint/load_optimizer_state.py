"""Loading of an optimizer's full states: rank 0 reads them, all ranks receive their shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import tree_map
from zinf_compile.errors import UnsupportedOptimizerError
from zinf_compile.ir.tiers import Tier
from zinf_compile.optim.chunks import MASTER
from zinf_compile.optim.elementwise_probe import states_kept
from zinf_compile.optim.precision import keep_precision, keeps_no_master
from zinf_compile.optim.record import record_of
from zinf_compile.optim.shard_state import kept_state
from zinf_compile.optim.state_dict_hooks import move_loaded
from zinf_compile.optim.state_layout import LAYOUT, note
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import scatter_whole

from .gathered import NOT_GIVEN, broadcast_into
from .save_optimizer_state import agree_on_order, large_states, ranks_of, units_of

_MOVED_BYTES = 64 << 20
"""Bytes of loaded states that are moved to their tier at a time. Small states share a chunk."""


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Shape and data type of a state tensor of rank 0, sent to the other ranks."""

    shape: torch.Size
    dtype: torch.dtype


def load_full_optimizer_state_dict(optimizer: Optimizer, state: Mapping[str, Any] | None) -> None:
    """Load what `full_optimizer_state_dict` returned, or a plain optimizer's `state_dict()`; only rank 0's `state` is read.

    A collective operation, for a partitioned model: after its first compiled call or `partition`. Groups, parameters and shapes
    are checked before anything changes; every mismatch is named, on all ranks. Each rank receives copies of its own
    shards, one parameter at a time, in the types in which this optimizer keeps them.
    """
    units, context = units_of(optimizer)
    if context is None:
        if not state:
            _raise_for(optimizer, [NOT_GIVEN])
        own = type(optimizer).load_state_dict is not Optimizer.load_state_dict  # knows itself what it takes
        _raise_for(optimizer, _no_mapping(state) if own else _mismatches(optimizer, units, state))
        load_plain(optimizer, dict(state or {}))
        return
    ranks = ranks_of(units)
    first = ranks.rank == 0
    numbers = [str([len(group["params"]) for group in optimizer.param_groups])]
    agree_on_order(units, "loading the optimizer", numbers, compare_steps=False)
    with ranks.fail_together("loading the optimizer"):
        problems = _mismatches(optimizer, units, state) if first else []
        plan = _plan(state) if first and state is not None and not problems else {}
    _raise_for(optimizer, ranks.share(problems, what="loading the optimizer: checking the state"))
    plan = ranks.share(plan, what="loading the optimizer")
    rows = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for key, (unit, (_, group)) in enumerate(zip(units, rows, strict=True)):
        saved = plan["state"].get(key, {})
        if MASTER in saved and unit is not None and keeps_no_master(optimizer, group, unit.dtype, unit):
            del saved[MASTER]
    given = state["state"] if first and state is not None else {}
    large = dict(large_states(plan["state"], units))

    def small_of(key: Any, names: Mapping[str, Any]) -> dict[str, Any]:
        rest = {n: _broadcast(given.get(key, {}).get(n), kept, context) for n, kept in names.items() if (key, n) not in large}
        return {n: _laid_out(value, rows[key][0]) if key in range(len(rows)) else value for n, value in rest.items()}

    small = {key: small_of(key, names) if isinstance(names, Mapping) else names for key, names in plan["state"].items()}
    optimizer.load_state_dict({**plan, "param_groups": _like(plan["param_groups"], optimizer), "state": small})
    record_of(optimizer).mark_ended(f"loading the states of {type(optimizer).__name__} ended in its middle: load them again")
    unmoved = 0
    for key, (parameter, group) in enumerate(rows):
        unit, names = units[key], plan["state"].get(key)
        if unit is None or not names:
            continue
        types = states_kept(optimizer, group, unit.placement.master_of(unit.dtype) or unit.dtype)
        loaded = optimizer.state[parameter]
        for name, kept in names.items():
            if (key, name) in large:
                value = _scatter(unit, given.get(key, {}).get(name), kept, name)
                value = value.to(unit.device if unit.placement.optimizer == Tier.DEVICE else "cpu", types.get(name, kept.dtype))
                loaded[name] = kept_state(value, unit)
                unmoved += value.nbytes
            elif isinstance(kept, _Tensor) and isinstance(loaded.get(name), torch.Tensor):  # PyTorch may have rounded it
                loaded[name] = small[key][name].to(loaded[name].device, types.get(name, kept.dtype), copy=True)
        if loaded:
            note(loaded, unit)
        if unmoved >= _MOVED_BYTES:
            move_loaded(optimizer)
            unmoved = 0
    move_loaded(optimizer)
    record_of(optimizer).mark_whole()


def load_plain(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load states into an optimizer none of whose parameters is partitioned, or not yet.

    Those with master copies keep their types: they may be partitioned with some, and else a step rounds them.
    """
    states = state.get("state")
    given = states.values() if isinstance(states, Mapping) else ()
    masters = any(MASTER in each for each in given if isinstance(each, Mapping))
    if masters:
        keep_precision(optimizer)
    optimizer.load_state_dict(state)
    record_of(optimizer).loaded_master |= masters


def _no_mapping(state: object) -> list[str]:
    accepted = "accepted: a mapping with 'state' and 'param_groups'"
    return [] if isinstance(state, Mapping) else [f"rank 0 was given a {type(state).__name__}; {accepted}"]


def _mismatches(optimizer: Optimizer, units: list[Unit | None], state: Mapping[str, Any] | None) -> list[str]:
    if state is None:
        return ["rank 0 was given no state"]
    if problems := _no_mapping(state):
        return problems
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
        for (key, name), unit in large_states(state["state"], units)
        if tuple((value := state["state"][key][name]).shape) != unit.shape
    ]


def _plan(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with each state tensor replaced by its shape and type."""

    def described(value: Any) -> Any:
        return _Tensor(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value

    def on_host(value: Any) -> Any:
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    states = {
        key: {name: described(value) for name, value in entry.items()} if isinstance(entry, Mapping) else entry
        for key, entry in state["state"].items()
    }
    return {**state, "state": states, "param_groups": tree_map(on_host, state["param_groups"])}


def _like(groups: list[dict[str, Any]], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups with tensor settings, such as learning rates, on this optimizer's devices."""

    def like(value: Any, present: Any) -> Any:
        both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
        return value.to(present.device) if both else value

    rows = zip(groups, optimizer.param_groups, strict=True)
    return [{name: like(value, mine.get(name)) for name, value in theirs.items()} for theirs, mine in rows]


def _scatter(unit: Unit, value: torch.Tensor | None, kept: _Tensor, name: str) -> torch.Tensor:
    """Scatter rank 0's value; return this rank's shard."""
    with torch.no_grad():
        full = None if value is None else unit.flat(value.detach().to(unit.device))
        shard = torch.empty(unit.shard_numel, dtype=kept.dtype, device=unit.device)
        scatter_whole(unit, full, shard, f"loading state {name} of {unit.name}")
    return shard


def _broadcast(value: Any, kept: Any, context: Context) -> Any:
    """Broadcast rank 0's value of a state that is not partitioned; return a copy on the host."""
    if not isinstance(kept, _Tensor):
        return kept
    with torch.no_grad():
        whole = torch.empty(kept.shape, dtype=kept.dtype, device=context.device)
        broadcast_into(whole, value, context, "loading the optimizer")
        return whole.to("cpu")


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """Return a state of a parameter's shape with its strides, which fused kernels expect."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_strided(value.shape, parameter.stride(), dtype=value.dtype).copy_(value)


def _raise_for(optimizer: Optimizer, problems: list[str]) -> None:
    if problems:
        raise UnsupportedOptimizerError(
            f"the state doesn't fit this {type(optimizer).__name__}; nothing was changed. {'; '.join(problems)}"
        )
