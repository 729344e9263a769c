"""Reconciles stored states with `optimizer.state` between steps: new and changed ones move to their tier, removed ones reset.

Called before a step, after loading, and before `state_dict()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import StoreError, UnsupportedOptimizerError
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.transfer.move import Location, move, on_host, route_of
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import MASTER, part_of
from .flat_states import FlatStates
from .shard_state import kept_state, shard_state
from .state_entry import StateEntry, states_of
from .state_layout import noted
from .state_table import StateTable

Given = Mapping[ShardedParameter, Mapping[str, Any]]
"""States that are in memory and belong on the drive."""


def reconcile(states: StateTable, optimizer: Optimizer) -> None:
    """Make the stored states equal to `optimizer.state`: move loaded ones to their tier, reset removed ones.

    `optimizer.state` and its entries may have been replaced by mappings of any class.
    """
    if states.by_entry:
        _absorb_entries(states, optimizer)
    else:
        _move_to_tier(states, optimizer)


def _absorb_entries(states: StateTable, optimizer: Optimizer) -> None:
    """Make the drive equal to `optimizer.state`: write new and changed states, reset missing ones."""
    found = {p: states_of(optimizer, p) for p in states.parameters}
    moved = [p for p, entry in found.items() if isinstance(entry, StateEntry) and entry is not states.entries.get(p)]
    found.update({p: dict(found[p]) for p in moved})  # before any entry is invalidated
    for parameter, entry in list(states.entries.items()):
        if found[parameter] is not entry:
            states.entries.pop(parameter).invalidate()
    write_changed_copies(states)
    fresh: dict[ShardedParameter, StateEntry] = {}
    given: dict[ShardedParameter, dict[str, Any]] = {}
    for parameter, kept in states.kept.items():
        content = found[parameter]
        known = parameter in states.entries
        if not known and not content:
            continue  # a reset parameter
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


def write_changed_copies(states: StateTable) -> None:
    """Write back the host copies that user code changed; drop copies without aliases."""
    copies = [(entry, name, copy) for entry in states.entries.values() for name, copy in entry.copies.items()]
    if not copies:
        return
    held = {id(copy): copy.held for _, _, copy in copies}  # before comparing: a copy without aliases can't change any more
    for number, chunk in enumerate(states.transfers.chunks):
        mine = [(e, n, c, piece) for e, n, c in copies for owner, piece in chunk.pieces if owner is e.parameter]
        if not mine:
            continue
        buffer, views = states.transfers.read(number)
        changed = False
        for _, name, copy, piece in mine:
            there = part_of(views[name], piece)
            if not copy.same_bytes(piece.start, piece.end, there):
                states.transfers.route.copy_in(copy.flat[piece.start : piece.end], there)
                changed = True
        if changed:
            states.transfers.write(number, buffer)
    for entry, name, copy in copies:
        if not held[id(copy)]:
            entry.copies.pop(name, None)


def _move_to_tier(states: StateTable, optimizer: Optimizer) -> None:
    """Replace loaded states by this rank's shards in the memory of their tier, which a step changes in place."""
    for parameter, kept in states.kept.items():
        settled = states.settled.get(parameter)
        if settled is not None and settled.are(states_of(optimizer, parameter)):
            continue
        names, unit = states.present(parameter, optimizer), parameter._zinf_unit
        if not names:
            continue
        state, shards = dict(optimizer.state[parameter]), {}
        leaves = unit.context.link.topology.side(unit.placement.optimizer) == Tier.HOST
        for name in names:
            value = shard_state(state[name], unit, name, optimizer)
            if MASTER in kept:  # those made without, or rounded by loading, are of the parameter's type
                value = value.to(kept[name])
            shards[name] = _on_host(value, unit) if leaves else value
            state[name] = kept_state(shards[name], unit)
        optimizer.state[parameter] = noted(state, unit)
        if len(names) == len(kept):
            states.settled[parameter] = FlatStates({name: state[name] for name in shards}, shards)


def _on_host(value: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Return a state's shard in host memory: itself, or a copy of what is in memory of a device."""
    if value.device.type == "cpu":
        return value
    host = torch.empty_like(value, device="cpu")
    move(Location(value), on_host(host), by=route_of(unit.context)).wait()
    return host


def _is_large(value: Any, parameter: ShardedParameter) -> bool:
    """Return whether a value is a state of the parameter's size, which the drive stores."""
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or parameter._zinf_unit.numel == 1)


def _forget_chunks(states: StateTable) -> None:
    """Discard chunks without valid states: they needn't be read, and may be unreadable."""
    for number, chunk in enumerate(states.transfers.chunks if states.transfers.store is not None else ()):
        entries = (states.entries.get(parameter) for parameter, _ in chunk.pieces)
        if not any(entry is not None and entry.stored for entry in entries):
            states.transfers.forget(number)


def _write(states: StateTable, optimizer: Optimizer, given: Given) -> None:
    if not given:
        return
    with contextlib.suppress(StoreError):  # errors of earlier writes; a failed block raises again when it is read
        states.transfers.drain()
    for number, chunk in enumerate(states.transfers.chunks):
        if any(p in given for p, _ in chunk.pieces):
            buffer, views = states.transfers.read(number)
            for parameter, piece in chunk.pieces:
                for name, state in given.get(parameter, {}).items():
                    value = shard_state(state, parameter._zinf_unit, name, optimizer)
                    if value.numel() < piece.end:
                        raise UnsupportedOptimizerError(
                            f"state {name!r} of {type(optimizer).__name__} for parameter {parameter._zinf_unit.name} has "
                            f"{value.numel()} elements; accepted: one for each element of the parameter, "
                            f"{list(parameter._zinf_unit.shape)}"
                        )
                    states.transfers.route.copy_in(value.reshape(-1)[piece.start : piece.end], part_of(views[name], piece))
            states.transfers.write(number, buffer)
