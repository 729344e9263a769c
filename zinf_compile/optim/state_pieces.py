"""This rank's states of an optimizer, piece by piece, wherever they live: read to be saved.

States on a drive come by chunks, which hold all states of some elements; those in memory by themselves. Called by `checkpoint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.units.shard_values import pieces_of
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import part_of
from .deferred_step import finish_deferred
from .offloaded_states import OffloadedStates
from .record import record_of
from .shard_state import shard_state
from .split_states import split_units
from .state_entry import in_memory, states_of
from .state_layout import without_note

Key = tuple[torch.Tensor, str]
"""A parameter and the name of a state."""


@dataclasses.dataclass(frozen=True)
class StatePiece:
    """Some elements of this rank's shard of a state, flat in host memory; valid until the next one is asked for."""

    parameter: torch.Tensor
    name: str
    start: int
    """Number of the first element in the shard."""
    values: torch.Tensor


@dataclasses.dataclass(frozen=True)
class OwnStates:
    """The states of one parameter."""

    unit: Unit | None
    """How those of the parameter's size are partitioned; None: they are whole on every rank."""
    large: Mapping[str, torch.dtype]
    """States of the parameter's size, with their types."""
    small: Mapping[str, Any]
    """Others, such as step counts."""


@torch.no_grad()
def own_states(optimizer: Optimizer) -> dict[torch.Tensor, OwnStates]:
    """Return what this rank has of each parameter that has states, in the order of the groups; a deferred step ends first."""
    finish_deferred(optimizer)
    for states in _offloaded(optimizer):
        states.reconcile(optimizer)
    split, found = split_units(optimizer), {}
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        given = states_of(optimizer, parameter)
        if not given:
            continue
        unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else split.get(parameter)
        on_drive = _on_drive(optimizer, parameter)
        memory = without_note(in_memory(given))
        large = {name: value.dtype for name, value in memory.items() if _is_large(value, parameter, unit)}
        found[parameter] = OwnStates(unit, {**large, **on_drive}, {n: v for n, v in memory.items() if n not in large})
    return found


@torch.no_grad()
def read_in_memory(optimizer: Optimizer, found: Mapping[torch.Tensor, OwnStates]) -> Iterator[StatePiece]:
    """Yield the elements of the large states in memory that `own_states` found; those of a whole one as if it were a shard."""
    for parameter, own in found.items():
        on_drive = _on_drive(optimizer, parameter)
        for name in sorted(own.large.keys() - on_drive.keys()):
            value = (states_of(optimizer, parameter) or {})[name]
            shard = value if own.unit is None else shard_state(value, own.unit, name, optimizer)
            flat = shard.detach().reshape(-1)
            for start, end in [(0, flat.numel())] if own.unit is None else pieces_of(own.unit):
                yield StatePiece(parameter, name, start, flat[start : min(end, flat.numel())].cpu())


def has_states_on_drive(optimizer: Optimizer) -> bool:
    """Say whether `read_on_drive` yields anything."""
    return any(states.transfers.store is not None for states in _offloaded(optimizer))


@torch.no_grad()
def read_on_drive(optimizer: Optimizer) -> Iterator[StatePiece]:
    """Yield the elements of states on drives. Any thread may, where no other uses the states meanwhile."""
    for states in _offloaded(optimizer):
        yield from _by_chunks(states)


def _by_chunks(states: OffloadedStates) -> Iterator[StatePiece]:
    entries, transfers = states.table.entries, states.transfers
    if transfers.store is None:
        return
    stored = {p: entry.stored for p, entry in entries.items()}
    wanted = [n for n, chunk in enumerate(transfers.chunks) if any(stored.get(p) for p, _ in chunk.pieces)]
    for position, number in enumerate(wanted):
        _, views = transfers.read(number)
        if len(transfers.buffers) > 1 and position + 1 < len(wanted):
            transfers.buffer_for(wanted[position + 1])  # is read meanwhile
        for parameter, piece in transfers.chunks[number].pieces:
            for name in sorted(stored.get(parameter, ())):
                yield StatePiece(parameter, name, piece.start, part_of(views[name], piece).cpu())


def _on_drive(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, torch.dtype]:
    for states in _offloaded(optimizer):
        if states.transfers.store is not None and parameter in states.table.entries:
            assert isinstance(parameter, ShardedParameter)
            kept = states.kept[parameter]
            return {name: kept[name] for name in sorted(states.table.entries[parameter].stored)}
    return {}


def _offloaded(optimizer: Optimizer) -> list[OffloadedStates]:
    return record_of(optimizer).offloaded or []


def _is_large(value: Any, parameter: torch.Tensor, unit: Unit | None) -> bool:
    """Say whether a value in memory has an element for each of the parameter."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    return value.shape == parameter.shape or (unit is not None and value.numel() in (unit.numel, unit.shard_numel))
