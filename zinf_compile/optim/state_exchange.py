"""Reads states from a drive into host memory, for readers of `optimizer.state` and for `state_dict()`."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from zinf_compile.errors import BudgetError, StepFailedError
from zinf_compile.ir.formats import format_of
from zinf_compile.sharded.host_shortage import host_shortage

from .chunks import part_of
from .load_states import reconcile, write_changed_copies
from .shard_state import kept_state
from .state_copy import StateCopy
from .state_entry import StateEntry, states_of
from .state_layout import noted
from .state_table import StateTable


def read_copy(states: StateTable, entry: StateEntry, name: str) -> torch.Tensor:
    """Read one state of one parameter into a tracked host copy; raise `BudgetError` without memory for it."""
    unit, found = entry.parameter._zinf_unit, entry.copies.get(name)
    if found is not None:
        return found.tensor()
    if states.transfers.buffers.held:
        raise StepFailedError(
            f"state {name!r} of {unit.name} can't be read now: a step of {states.optimizer_name} is under way, as in another "
            "thread beside it, or ended in its middle. Read states once step() has returned; where it has failed, load a "
            "checkpoint first"
        )
    with states.transfers.context.lanes.meter.waiting(), torch.no_grad():
        write_changed_copies(states)
        dtype = states.kept[entry.parameter][name]
        needed = format_of(dtype).bytes(unit.shard_numel)
        if short := host_shortage(states.transfers.context, needed):
            raise BudgetError(
                f"reading state {name!r} of {unit.name} would take {needed:,} bytes of host memory; {short.available:,} "
                f"bytes are available. {short.named}. Or drop other states of this {states.optimizer_name} that you hold, or "
                f"reset this one unread (del optimizer.state[parameter][{name!r}], optimizer.state.clear())"
            )
        copy = StateCopy(unit, dtype)
        for number, chunk in enumerate(states.transfers.chunks):
            for parameter, piece in chunk.pieces:
                if parameter is entry.parameter:
                    _, views = states.transfers.read(number)
                    states.transfers.route.copy_out(part_of(views[name], piece), copy.flat[piece.start : piece.end])
    entry.copies[name] = copy
    return copy.tensor()


def read_all(states: StateTable, optimizer: Optimizer) -> None:
    """Read all states into `optimizer.state`; raise `BudgetError` without memory for them."""
    if not states.by_entry:
        return
    reconcile(states, optimizer)
    stored = [(p, name, states.kept[p][name]) for p, entry in states.entries.items() for name in entry if name in entry.stored]
    needed = sum(format_of(dtype).bytes(p._zinf_unit.shard_numel) for p, _, dtype in stored)
    if short := host_shortage(states.transfers.context, needed):
        folders = ", ".join(states.transfers.store.folders) if states.transfers.store is not None else ""
        raise BudgetError(
            f"{type(optimizer).__name__}.state_dict() would take {needed:,} bytes of host memory for the states that live on "
            f"{folders}; {short.available:,} bytes are available. {short.named}. Or save the model alone "
            "(zinf_compile.full_state_dict)"
        )
    whole = {(p, name): torch.empty(p._zinf_unit.shard_numel, dtype=dtype) for p, name, dtype in stored}
    for number, chunk in enumerate(states.transfers.chunks):
        wanted = [(p, piece, n) for p, piece in chunk.pieces for n in states.kept[p] if (p, n) in whole]
        if wanted:
            _, views = states.transfers.read(number)
            for parameter, piece, name in wanted:
                states.transfers.route.copy_out(part_of(views[name], piece), whole[parameter, name][piece.start : piece.end])
    for parameter, entry in states.entries.items():
        unit = parameter._zinf_unit
        large = {n: kept_state(value, unit) for (p, n), value in whole.items() if p is parameter}
        brought = noted({**entry.memory, **large}, unit)
        states.for_state_dict[parameter] = optimizer.state[parameter] = brought


def drop_all(states: StateTable, optimizer: Optimizer) -> None:
    """Undo `read_all`: put the entries back into `optimizer.state`."""
    for parameter, brought in states.for_state_dict.items():
        if states_of(optimizer, parameter) is brought:  # not in place: the state dict refers to the same dicts
            optimizer.state[parameter] = states.entries[parameter]
    states.for_state_dict.clear()
