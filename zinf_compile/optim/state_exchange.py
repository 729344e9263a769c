"""States between `optimizer.state` and the drive: what was taken out, replaced, changed or read there between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import BudgetError, StepFailedError, StoreError, UnsupportedOptimizerError
from zinf_compile.sharded.host_shortage import host_shortage
from zinf_compile.sharded.parameter import ShardedParameter

from .chunk_step import part_of
from .lent_state import LentState
from .shard_state import kept_state, shard_state
from .state_entry import StateEntry, states_of
from .state_layout import noted

if TYPE_CHECKING:
    from .offloaded_states import StreamedStates

Given = Mapping[ShardedParameter, Mapping[str, Any]]
"""States that are in memory and belong on the drive."""


def absorb(states: StreamedStates, optimizer: Optimizer) -> None:
    """Make the drive have what `optimizer.state` says: what it lacks is reset, what it was given or had changed is written.

    `optimizer.state`, and each parameter's entry in it, may be another mapping than before, of any class.
    """
    found = {p: states_of(optimizer, p) for p in states.parameters}
    moved = [p for p, entry in found.items() if isinstance(entry, StateEntry) and entry is not states.entries.get(p)]
    found.update({p: dict(found[p]) for p in moved})  # while all is there still
    for parameter, entry in list(states.entries.items()):
        if found[parameter] is not entry:
            states.entries.pop(parameter).lose()
    put_back(states)
    fresh: dict[ShardedParameter, StateEntry] = {}
    given: dict[ShardedParameter, dict[str, Any]] = {}
    for parameter, kept in states.kept.items():
        content = found[parameter]
        known = parameter in states.entries
        if not known and not content:
            continue  # as if it never had any
        memory = content.memory if known else dict(content)
        large = {name: memory[name] for name in kept if _is_large(memory.get(name), parameter)}
        if not known:
            fresh[parameter] = states.new_entry(optimizer, parameter, memory)
        if large:
            given[parameter] = large
    for parameter, entry in {**states.entries, **fresh}.items():
        entry.stored -= given.get(parameter, {}).keys()
    _forget_chunks(states)
    _write(states, optimizer, given)
    for parameter, entry in {**states.entries, **fresh}.items():
        for name in given.get(parameter, ()):
            entry.memory.pop(name)
            entry.stored.add(name)
    for parameter, entry in fresh.items():
        states.entries[parameter] = entry
        optimizer.state[parameter] = entry


def put_back(states: StreamedStates) -> None:
    """Write what callers changed of the states that they were lent; let go of those that nobody holds any more."""
    lent = [(entry, name, copy) for entry in states.entries.values() for name, copy in entry.lent.items()]
    if not lent:
        return
    held = {id(copy): copy.held for _, _, copy in lent}  # before they are compared: what nobody holds, nobody changes
    for number, chunk in enumerate(states.chunks):
        mine = [(e, n, c, piece) for e, n, c in lent for owner, piece in chunk.pieces if owner is e.parameter]
        if not mine:
            continue
        slot, views = states.read(number)
        changed = False
        for _, name, copy, piece in mine:
            there = part_of(views[name], piece)
            if not copy.same_bytes(piece.start, piece.end, there):
                there.copy_(copy.flat[piece.start : piece.end])
                changed = True
        if changed:
            states.write_chunk(number, slot)
    for entry, name, copy in lent:
        if not held[id(copy)]:
            entry.lent.pop(name, None)


def lend(states: StreamedStates, entry: StateEntry, name: str, optimizer_name: str) -> torch.Tensor:
    """Read one state of one parameter into memory of its own; raise `BudgetError` where there is none."""
    unit, found = entry.parameter._zinf_unit, entry.lent.get(name)
    if found is not None:
        return found.tensor()
    if states.updating:
        raise StepFailedError(
            f"state {name!r} of {unit.name} can't be read now: a step of {optimizer_name} is under way, as in a hook of it, or "
            "ended in its middle. Read states once step() has returned; where it has failed, load a checkpoint first"
        )
    with states.context.meter.waiting(), torch.no_grad():
        put_back(states)
        dtype = states.kept[entry.parameter][name]
        needed = unit.shard_numel * dtype.itemsize
        if short := host_shortage(states.context, needed):
            raise BudgetError(
                f"reading state {name!r} of {unit.name} would take {needed:,} bytes of host memory; {short.available:,} "
                f"bytes are available. {short.named}. Or drop other states of this {optimizer_name} that you hold, or reset this "
                f"one unread (del optimizer.state[parameter][{name!r}], optimizer.state.clear())"
            )
        copy = LentState(unit, dtype)
        for number, chunk in enumerate(states.chunks):
            for parameter, piece in chunk.pieces:
                if parameter is entry.parameter:
                    _, views = states.read(number)
                    copy.flat[piece.start : piece.end].copy_(part_of(views[name], piece))
    entry.lent[name] = copy
    return copy.tensor()


def bring(states: StreamedStates, optimizer: Optimizer) -> None:
    """Put all states into `optimizer.state`; raise `BudgetError` where there is no memory for them."""
    if not states.by_entry:
        return
    absorb(states, optimizer)
    stored = [(p, name, states.kept[p][name]) for p, entry in states.entries.items() for name in entry if name in entry.stored]
    needed = sum(p._zinf_unit.shard_numel * dtype.itemsize for p, _, dtype in stored)
    if short := host_shortage(states.context, needed):
        folders = ", ".join(states.store.folders) if states.store is not None else ""
        raise BudgetError(
            f"{type(optimizer).__name__}.state_dict() would take {needed:,} bytes of host memory for the states that live on "
            f"{folders}; {short.available:,} bytes are available. {short.named}. Or save the model alone "
            "(zinf_compile.full_state_dict)"
        )
    whole = {(p, name): torch.empty(p._zinf_unit.shard_numel, dtype=dtype) for p, name, dtype in stored}
    for number, chunk in enumerate(states.chunks):
        wanted = [(p, piece, n) for p, piece in chunk.pieces for n in states.kept[p] if (p, n) in whole]
        if wanted:
            _, views = states.read(number)
            for parameter, piece, name in wanted:
                whole[parameter, name][piece.start : piece.end].copy_(part_of(views[name], piece))
    for parameter, entry in states.entries.items():
        unit = parameter._zinf_unit
        large = {n: kept_state(value, unit) for (p, n), value in whole.items() if p is parameter}
        brought = noted({**entry.memory, **large}, unit)
        states.brought[parameter] = optimizer.state[parameter] = brought


def drop(states: StreamedStates, optimizer: Optimizer) -> None:
    """Take out of `optimizer.state` what `bring` put there."""
    for parameter, brought in states.brought.items():
        if states_of(optimizer, parameter) is brought:  # not in place: the state dict holds the same mappings
            optimizer.state[parameter] = states.entries[parameter]
    states.brought.clear()


def _is_large(value: Any, parameter: ShardedParameter) -> bool:
    """Say whether a value is what the drive keeps: a tensor for each element; not None or a number in its place."""
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or parameter._zinf_unit.numel == 1)


def _forget_chunks(states: StreamedStates) -> None:
    """Let chunks count no more of which no state does: they need not be read, and may be what can't be."""
    for number, chunk in enumerate(states.chunks if states.store is not None else ()):
        entries = (states.entries.get(parameter) for parameter, _ in chunk.pieces)
        if not any(entry is not None and entry.stored for entry in entries):
            states.forget_chunk(number)


def _write(states: StreamedStates, optimizer: Optimizer, given: Given) -> None:
    if not given:
        return
    with contextlib.suppress(StoreError):  # of what was to be kept before: what can't be read says so when it is
        states.settle_slots()
    for number, chunk in enumerate(states.chunks):
        if any(p in given for p, _ in chunk.pieces):
            slot, views = states.read(number)
            for parameter, piece in chunk.pieces:
                for name, state in given.get(parameter, {}).items():
                    value = shard_state(state, parameter._zinf_unit, name, optimizer)
                    if value.numel() < piece.end:
                        raise UnsupportedOptimizerError(
                            f"state {name!r} of {type(optimizer).__name__} for parameter {parameter._zinf_unit.name} has "
                            f"{value.numel()} elements; accepted: one for each element of the parameter, "
                            f"{list(parameter._zinf_unit.shape)}"
                        )
                    part_of(views[name], piece).copy_(value.reshape(-1)[piece.start : piece.end])
            states.write_chunk(number, slot)
