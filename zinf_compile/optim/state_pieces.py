"""This rank's states of an optimizer, piece by piece, wherever they live: read to be saved.

States on a drive come by chunks, which hold all states of some elements; those in memory by themselves. Called by `checkpoint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import UnsupportedOptimizerError
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.pieces import Piece
from zinf_compile.ir.sizes import BLOCK_BYTES
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .chunk_transfers import ChunkTransfers
from .deferred_step import finish_deferred
from .offloaded_states import OffloadedStates
from .record import record_of
from .shard_state import shard_state
from .split_states import split_units
from .state_entry import in_memory, states_of
from .state_layout import without_note
from .watched_states import StatesWatch, unshared

Key = tuple[torch.Tensor, str]
"""A parameter and the name of a state."""


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
def own_states(optimizer: Optimizer, updating: Collection[OffloadedStates] = ()) -> dict[torch.Tensor, OwnStates]:
    """Return what this rank has of each parameter that has states, in the order of the groups; a deferred step ends first.

    `updating`: what a deferred step may still update meanwhile, and nobody waits for it; small states are those before it.
    """
    if not updating:
        finish_deferred(optimizer)
    for states in _offloaded(optimizer):
        if states not in updating:
            states.reconcile(optimizer)
    split, found = split_units(optimizer), {}
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        given, on_drive = in_memory(states_of(optimizer, parameter)), _on_drive(optimizer, parameter)
        if not given and not on_drive:
            continue
        unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else split.get(parameter)
        memory = without_note(given)
        large = {name: value.dtype for name, value in memory.items() if _is_large(value, parameter, unit)}
        found[parameter] = OwnStates(unit, {**large, **on_drive}, {n: v for n, v in memory.items() if n not in large})
    return found


def small_states(updated: Iterable[OffloadedStates]) -> dict[torch.Tensor, Mapping[str, Any]]:
    """Return the small states of each parameter that the last step has updated in parts, as it has committed them.

    Raises `UnsupportedOptimizerError` where it has added or dropped a state of a parameter's size.
    """
    found: dict[torch.Tensor, Mapping[str, Any]] = {}
    for states in updated:
        for parameter in states.due:
            entry, names = states.table.entries.get(parameter), set(states.kept[parameter])
            if (entry.stored if entry is not None else set()) != names:
                raise UnsupportedOptimizerError(
                    f"a step has added states of {parameter._zinf_unit.name} or dropped some; found {sorted(names)} before it: "
                    "call zinf_compile.synchronize() between optimizer.step() and zinf_compile.save()"
                )
            found[parameter] = without_note(entry.memory) if entry is not None else {}
    return found


@dataclasses.dataclass(frozen=True)
class MemoryState:
    """A large state in memory."""

    parameter: torch.Tensor
    name: str
    read: Callable[[], torch.Tensor]
    """Returns this rank's shard, flat; a whole one as if it were that."""
    watch: StatesWatch | None
    """For one that nobody changes without asking for it, and of which `read` returns the same memory later; None: any other."""


def states_in_memory(optimizer: Optimizer, found: Mapping[torch.Tensor, OwnStates]) -> Iterator[MemoryState]:
    """Yield the large states in memory that `own_states` found."""
    for parameter, own in found.items():
        names = sorted(own.large.keys() - _on_drive(optimizer, parameter).keys())
        alone = unshared(optimizer, parameter, names) if own.unit is not None else []
        watch = StatesWatch(optimizer, parameter)
        for name in names:
            shard = _shard_of(optimizer, parameter, own, name)
            if name in alone and shard.data_ptr() == optimizer.state[parameter][name].data_ptr():
                watch.names.add(name)
                yield MemoryState(parameter, name, partial(_itself, shard), watch)
            else:
                yield MemoryState(parameter, name, partial(_shard_of, optimizer, parameter, own, name), None)


def _itself(shard: torch.Tensor) -> torch.Tensor:
    return shard


@torch.no_grad()
def _shard_of(optimizer: Optimizer, parameter: torch.Tensor, own: OwnStates, name: str) -> torch.Tensor:
    value = (states_of(optimizer, parameter) or {})[name]
    shard = value if own.unit is None else shard_state(value, own.unit, name, optimizer)
    flat: torch.Tensor = shard.detach().reshape(-1)
    return flat


@dataclasses.dataclass(frozen=True)
class DrivePiece:
    """A block of one state of a chunk on a drive, elements [start, end) of it, and whose states are in it."""

    transfers: ChunkTransfers
    chunk: int
    name: str
    start: int
    end: int
    dtype: torch.dtype
    parts: Sequence[tuple[torch.Tensor, int, int, int]]
    """Parameter, number of the first element in its shard, and in the block, and number of elements."""

    def read(self, into: torch.Tensor) -> Pending:
        """Start to read it into host memory. Any thread may."""
        return self.transfers.read_part(self.chunk, self.name, self.start, into)


def pieces_on_drive(optimizer: Optimizer) -> Iterator[DrivePiece]:
    """Yield the blocks of states on drives, those that the next step updates last first; after `own_states`."""
    for states in _offloaded(optimizer):
        transfers, entries = states.transfers, states.table.entries
        stored = {p: entry.stored for p, entry in entries.items()}
        for number in reversed(states.next_order()) if transfers.store is not None else ():
            chunk = transfers.chunks[number]
            for name in sorted({name for p, _ in chunk.pieces for name in stored.get(p, ())}):
                mine = [(p, piece) for p, piece in chunk.pieces if name in stored.get(p, ())]
                step = format_of(chunk.states[name]).numel_within(BLOCK_BYTES)
                for begin in range(0, chunk.numel, step):
                    end = min(begin + step, chunk.numel)
                    parts = [part for p, piece in mine for part in _within(p, piece, begin, end)]
                    if parts:
                        yield DrivePiece(transfers, number, name, begin, end, chunk.states[name], parts)


def _within(parameter: torch.Tensor, piece: Piece, begin: int, end: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    first, last = max(begin, piece.place), min(end, piece.place + piece.end - piece.start)
    if first < last:
        yield parameter, piece.start + first - piece.place, first - begin, last - first


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
