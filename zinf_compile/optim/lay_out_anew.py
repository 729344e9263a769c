"""Lays the states of a step's chunks out anew, where an optimizer keeps more of them than it did at first.

So it does where a setting is switched on (momentum, amsgrad), where a state dict with more states is loaded, and where user code
adds some. Called by `state_dict_hooks` at the beginning of a step, before anything is updated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import BudgetError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.host_shortage import host_shortage
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import MASTER, Kept
from .elementwise_probe import states_kept
from .offloaded_states import OffloadedStates
from .record import record_of
from .state_entry import in_memory, states_of

Groups = Mapping[int, Mapping[str, Any]]
"""The optimizer's group of each parameter, by the parameter's id."""


def outgrown(optimizer: Optimizer, states: OffloadedStates, groups: Groups) -> dict[ShardedParameter, Kept] | None:
    """Return what each parameter keeps from now on, where that is more than was laid out; None where it isn't."""
    found: dict[ShardedParameter, Kept] = {}
    made: dict[tuple[int, torch.dtype], Kept] = {}
    for parameter, kept in states.kept.items():
        group, dtype = groups.get(id(parameter), {}), kept.get(MASTER, parameter._zinf_unit.dtype)
        key = id(group), dtype
        if key not in made:
            made[key] = states_kept(optimizer, group, dtype) if group else {}
        own = made[key] if made[key].keys() <= kept.keys() else {**made[key], **kept}
        given = _given(in_memory(states_of(optimizer, parameter)), parameter._zinf_unit, kept)
        found[parameter] = {**given, **own, **kept} if given or own is not made[key] else kept
    return found if any(found[p] is not kept for p, kept in states.kept.items()) else None


def _given(memory: Mapping[str, Any], unit: Unit, kept: Kept) -> Kept:
    """Return the states in memory, one number for each element, that are not among those laid out."""
    return {
        name: value.dtype
        for name, value in memory.items()
        if name not in kept and type(value) is torch.Tensor and value.dim() and _is_of(value, unit)
    }


def _is_of(value: torch.Tensor, unit: Unit) -> bool:
    return tuple(value.shape) == unit.shape or (unit.shard_group.size > 1 and value.shape == (unit.shard_numel,))


def lay_out_anew(
    optimizer: Optimizer,
    states: OffloadedStates,
    kept: Mapping[ShardedParameter, Kept],
    finish: Callable[[Optimizer], None],
) -> OffloadedStates:
    """Return the same with room for `kept`, with all states that there are; those on a drive are copied, parameter by parameter.

    Raises `BudgetError` or `StoreError` before anything is changed.
    """
    old, table = states.transfers, states.table
    for number in range(len(states.chunks) if old.saving is not None else 0):
        assert old.saving is not None, "it goes on"
        old.saving.before_change(old.owner(number), 0, sys.maxsize)
    states.reconcile(optimizer)
    old.free_buffers()
    new = OffloadedStates(optimizer, list(kept), list(kept.values()), finish, counted=_fresh(states, kept))
    try:
        old.make_buffers()
        _check_room(optimizer, states)
    except BaseException:
        new.transfers.release()
        raise
    entries = {p: optimizer.state.pop(p) for p in table.parameters if p in table.entries}
    try:
        for parameter, entry in entries.items():
            optimizer.state[parameter] = {name: entry[name] for name in entry}
            new.reconcile(optimizer)
    except BaseException:
        record_of(optimizer).mark_ended(
            f"states of {type(optimizer).__name__} were lost while they were laid out anew. Load a checkpoint of model and "
            f"optimizer, and go on from there{record_of(optimizer).way_back}"
        )
        raise
    for entry in entries.values():
        entry.invalidate()
    table.entries.clear()
    old.release()
    new.reconcile(optimizer)
    return new


def _fresh(states: OffloadedStates, kept: Mapping[ShardedParameter, Kept]) -> dict[ShardedParameter, Kept]:
    """Return the states that are new, which no account has yet."""
    return {p: {name: dtype for name, dtype in own.items() if name not in states.kept[p]} for p, own in kept.items()}


def _check_room(optimizer: Optimizer, states: OffloadedStates) -> None:
    """Raise `BudgetError` without host memory for the states of the largest parameter on a drive."""
    numels = (
        (format_of(states.kept[p][name]).bytes(p._zinf_unit.shard_numel) for name in entry.stored)
        for p, entry in states.table.entries.items()
    )
    needed = max(map(sum, numels), default=0)
    if short := host_shortage(states.context, needed):
        raise BudgetError(
            f"{type(optimizer).__name__} keeps more states than at first. Laying them out anew takes {needed:,} bytes of host "
            f"memory; {short.available:,} bytes are available. {short.named}"
        )
