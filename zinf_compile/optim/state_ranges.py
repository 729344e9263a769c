"""Any range of elements of this rank's shard of one state: read and written wherever it lives, without the others.

Called by `checkpoint`, for others' loops over tensors; `state_pieces` and `load_pieces` go by the order of the drive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .chunk_transfers import ChunkTransfers
from .chunks import part_of
from .load_pieces import like_step, load_states
from .offloaded_states import OffloadedStates
from .record import record_of
from .shard_state import shard_state
from .split_states import split_units
from .state_accounts import account_states
from .state_entry import states_of
from .state_layout import noted
from .state_pieces import Key, OwnStates, own_states
from .states_to_come import large_states_to_come


class StateRange:
    """This rank's shard of one state, by the numbers of elements; zeros where no step has made it yet."""

    def __init__(self, optimizer: Optimizer, parameter: torch.Tensor, name: str, unit: Unit, dtype: torch.dtype) -> None:
        self._optimizer, self._parameter, self._name, self._unit, self._dtype = optimizer, parameter, name, unit, dtype

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return the elements [start, end), flat in host memory of their own."""
        if self._parameter not in self._optimizer.state:
            return torch.zeros(end - start, dtype=self._dtype)
        transfers = self._transfers()
        if transfers is None:
            return self._in_memory()[start:end].to("cpu", copy=True)
        found: list[torch.Tensor] = []
        for number, low, high, begin, piece in self._chunks(transfers, start, end):
            _, views = transfers.read(number)
            found.append(part_of(views[self._name], piece)[low - begin : high - begin].to("cpu", copy=True))
        return torch.cat(found) if len(found) != 1 else found[0]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace elements from number `start` on."""
        transfers, end = self._transfers(), start + values.numel()
        if transfers is None:
            self._in_memory()[start:end].copy_(values)
            return
        for number, low, high, begin, piece in self._chunks(transfers, start, end):
            buffer, views = transfers.read(number)
            part_of(views[self._name], piece)[low - begin : high - begin].copy_(values[low - start : high - start])
            transfers.write(number, buffer)

    def _transfers(self) -> ChunkTransfers | None:
        states = self._offloaded()
        return None if states is None or states.transfers.store is None else states.transfers

    def _offloaded(self) -> OffloadedStates | None:
        known: list[OffloadedStates] = record_of(self._optimizer).offloaded or []
        return next((states for states in known if self._parameter in states.kept and self._name in _stored(states, self)), None)

    def _in_memory(self) -> torch.Tensor:
        value = (states_of(self._optimizer, self._parameter) or {})[self._name]
        shard: torch.Tensor = shard_state(value, self._unit, self._name, self._optimizer)
        return shard.detach().view(-1)

    def _chunks(self, transfers: ChunkTransfers, start: int, end: int) -> list[tuple[int, int, int, int, Any]]:
        """Return the chunks with elements of [start, end): number, the elements in it, where its piece begins, and the piece."""
        return [
            (number, max(start, piece.start), min(end, piece.end), piece.start, piece)
            for number, chunk in enumerate(transfers.chunks)
            for owner, piece in chunk.pieces
            if owner is self._parameter and max(start, piece.start) < min(end, piece.end)
        ]


def _stored(states: OffloadedStates, of: StateRange) -> Any:
    entry = states.table.entries.get(of._parameter)  # type: ignore[call-overload]
    return () if entry is None else entry.stored


def states_to_load(optimizer: Optimizer) -> dict[torch.Tensor, OwnStates]:
    """Return the states that each parameter has or, where it has none, those of its size that the first step would make."""
    found, split = own_states(optimizer), split_units(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p not in found:
                unit = p._zinf_unit if isinstance(p, ShardedParameter) else split.get(p)
                found[p] = OwnStates(unit, large_states_to_come(optimizer, group, p, unit), {})
    return found


class _Zeros:
    """A state that no step has made."""

    def finish(self, into: torch.Tensor) -> None:
        into.zero_()


@torch.no_grad()
def begin_loading(optimizer: Optimizer, made: Mapping[Key, torch.dtype], why: str) -> None:
    """Let steps raise `StepFailedError` with the message `why` until `end_loading`; where states are `made`, begin with zeros."""
    if made:
        load_states(optimizer, {p: {} for p, _ in made}, made, lambda wanted: (_Zeros() for _ in wanted))
    record_of(optimizer).mark_ended(why)


@torch.no_grad()
def end_loading(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], small: Mapping[torch.Tensor, Mapping[str, Any]]
) -> None:
    """Set settings, by group, and the states that are not of their parameter's size; remove those of other parameters."""
    split = split_units(optimizer)
    for states in record_of(optimizer).offloaded or []:
        states.transfers.drain()
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        for name, value in settings.items():
            present = group.get(name)
            both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
            group[name] = value.to(present.device) if both else value  # type: ignore[union-attr]
    for parameter, values in small.items():
        moved = {name: like_step(value, parameter, optimizer) for name, value in values.items()}
        entry = states_of(optimizer, parameter)
        if entry is not None:
            for name, value in moved.items():
                entry[name] = value
        elif moved:
            unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else split.get(parameter)  # type: ignore[call-overload]
            optimizer.state[parameter] = moved if unit is None else noted(moved, unit)
    for parameter in [p for group in optimizer.param_groups for p in group["params"] if p not in small]:
        optimizer.state.pop(parameter, None)
    record = record_of(optimizer)
    account_states(optimizer)
    record.mark_whole()
    if record.steps_done is not None:
        record.steps_done = 0
