"""One chunk in a step of the optimizer: the tensors that the stand-in updates, and the write-back of values and states.

Called by `chunked_step` and `deferred_step`; knows no threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Hashable, Mapping, MutableMapping, Sequence, Set
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import UnsupportedOptimizerError
from zinf_compile.ir.chunk_columns import GRADIENT, VALUE
from zinf_compile.ir.pieces import Piece
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffer
from zinf_compile.runtime.transfer.move import StagingBuffers
from zinf_compile.runtime.units.pending_updates import Updates
from zinf_compile.runtime.units.saving import ShardsSave
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import MASTER, Chunk, part_of
from .offloaded_states import KeptPiece, OffloadedStates
from .timed_update import timed_update

_COMPARED_ELEMENTS = 1 << 18
"""Elements compared at a time; bounds the temporary memory."""


class ChunkStep:
    """One chunk in its buffer, as tensors for a step of the stand-in."""

    def __init__(self, owner: OffloadedStates, number: int, chunk: Chunk, buffer: ChunkBuffer, optimizer: Optimizer) -> None:
        self._owner, self._number, self._buffer, self._optimizer = owner, number, buffer, optimizer
        self._name = chunk.name
        self._states = owner.transfers.state_views(number, buffer)
        self._kept = chunk.states
        self.parts: list[tuple[ShardedParameter, torch.Tensor]] = []
        """Each parameter, with the part of its shard that this chunk updates."""
        self._pieces: list[tuple[Piece, torch.Tensor]] = []
        """For each part: its piece, and the parameter's own values; the part itself unless there is a master copy."""
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        """The optimizer's state for the parts."""
        self.scalar_states: dict[ShardedParameter, dict[str, Any]] = {}
        """States that aren't of a parameter's size, such as step counts; committed when the whole step is over."""
        self._arriving: list[list[Pending]] = []
        """For each part: the transfer of the updated values to where the shard lives, where that is memory elsewhere."""
        self._large: dict[ShardedParameter, Set[str]] = {}
        """Names of the states of a parameter's size."""
        self._beside: dict[ShardedParameter, dict[str, Any]] = {}
        """Tensors that user code keeps among the states, and that are none of the optimizer's: they stay as they are."""
        for place, columns in buffer.brought.items():
            parameter, piece = chunk.pieces[place]
            value, gradient = columns[VALUE], columns[GRADIENT]
            changes = owner.gradients[parameter].changes
            if changes is not None:
                changes(gradient)
            present = owner.table.present(parameter, optimizer)
            states = self._states_of(piece, columns)
            part = self._master(value, states, known=MASTER in present) if MASTER in chunk.states else value
            part.grad = gradient.to(part.dtype)
            self.parts.append((parameter, part))
            self._pieces.append((piece, value))
            other = owner.table.other_states(parameter, optimizer, but=present)
            if other is not None:
                beside = {k: v for k, v in other.items() if k not in self._kept and isinstance(v, torch.Tensor) and v.numel() > 1}
                self._beside[parameter] = beside
                other = {k: v for k, v in other.items() if k not in beside}
                small = {k: _copied(v, part) if isinstance(v, torch.Tensor) else v for k, v in other.items()}
                self.state[part] = small | {k: v for k, v in states.items() if k in present and k != MASTER}

    def finish(self, stepped: MutableMapping[torch.Tensor, dict[str, Any]]) -> None:
        """Start writing back values and states; keep small states in `scalar_states`. Empties `stepped`."""
        staging = self._owner.transfers.staging(self._number, self._buffer)
        parts, self.parts = self.parts, []  # parts may own memory: free it before the next chunk allocates as much
        self.state.clear()
        brought = self._buffer.brought.values()
        values: dict[int, KeptPiece] = {}
        kept: list[KeptPiece] = []
        for number, ((parameter, part), (piece, value), columns) in enumerate(zip(parts, self._pieces, brought, strict=True)):
            part.grad = None
            scalars, large = self.scalar_states.setdefault(parameter, {}), set[str]()
            states = stepped.pop(part, {})
            if part is not value:
                value.copy_(part)
                states[MASTER] = part
            if self._moves(value, columns.get(VALUE)):
                values[number] = parameter, piece, VALUE, value
            for name, state in states.items():
                if not self._is_large(name, state):
                    scalars[name] = state
                    continue
                large.add(name)
                if self._moves(state, columns.get(name)):
                    kept += self._finish_state(parameter, piece, name, state, staging)
            self._large[parameter] = large
            scalars.update(self._beside.get(parameter, {}))
            self._owner.applied(parameter)
        arriving = dict(zip(values, self._keep(list(values.values()), staging), strict=True))
        self._keep(kept, staging)  # behind the values, which the next forward waits for
        self._arriving = [[pending] if (pending := arriving.get(number)) is not None else [] for number in range(len(parts))]
        self._owner.write(self._number, self._buffer)

    def timed(self, last: ChunkStep) -> contextlib.AbstractContextManager[object]:
        """Return the context of an update of this chunk to the last one, whose time is noted where the step is recorded."""
        name = self._name if last is self else f"{self._name} .. {last._name}"
        return timed_update(self._owner.context, name, on_device=self._owner.transfers.route.device_apart)

    @property
    def owner(self) -> Hashable:
        """What a save knows its states by."""
        return self._owner.transfers.owner(self._number)

    def hand_to(self, save: ShardsSave) -> None:
        """Let a save that waits for them have the values and states after `finish`, before they are reported."""
        with self._owner.context.lanes.meter.waiting():
            for parameter, (piece, value) in zip(self.scalar_states, self._pieces, strict=True):
                save.updated(parameter._zinf_unit, piece.start, piece.end, {VALUE: value}, piece.start)
            if self._states:
                save.updated(self.owner, 0, self._owner.chunks[self._number].numel, self._states)

    def report(self, updates: Updates[Unit]) -> None:
        """Note what is updated, before the next chunk is requested."""
        for parameter, (piece, value), arriving in zip(self.scalar_states, self._pieces, self._arriving, strict=True):
            updates.updated(parameter._zinf_unit, piece.start, piece.end, value, arriving)
        self._arriving = []

    def commit(self, optimizer: Optimizer) -> None:
        """Commit this chunk's states, after the whole step."""
        for parameter in self.scalar_states:
            self.commit_of(parameter, optimizer)

    def commit_of(self, parameter: ShardedParameter, optimizer: Optimizer) -> None:
        """Commit its states of one parameter."""
        self._owner.commit(parameter, optimizer, self.scalar_states[parameter], self._large[parameter])

    def _states_of(self, piece: Piece, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._states:
            return {name: part_of(view, piece) for name, view in self._states.items()}
        return {name: columns[name] for name in self._kept if name in columns}

    def _master(self, value: torch.Tensor, states: Mapping[str, torch.Tensor], *, known: bool) -> torch.Tensor:
        """Return the master copy; elements whose parameter was changed since, as by loading, take the parameter's value."""
        if MASTER not in states:
            return value.to(self._kept[MASTER])
        master = _alias(states[MASTER])
        if not known:
            return master.copy_(value)
        for mine, theirs in zip(master.split(_COMPARED_ELEMENTS), value.split(_COMPARED_ELEMENTS), strict=True):
            mine.copy_(torch.where(mine.to(theirs.dtype) == theirs, mine, theirs.to(mine.dtype)))
        return master

    def _moves(self, value: torch.Tensor, column: torch.Tensor | None) -> bool:
        """Say whether an updated column has to be brought anywhere, or is where it lives."""
        return self._buffer.moves or column is None or value.data_ptr() != column.data_ptr()

    def _is_large(self, name: str, state: Any) -> bool:
        return isinstance(state, torch.Tensor) and (state.numel() > 1 or name in self._kept)

    def _finish_state(
        self, parameter: ShardedParameter, piece: Piece, name: str, state: Any, staging: Mapping[str, StagingBuffers]
    ) -> list[KeptPiece]:
        """Return what is still to be kept: a new one is, and one on a drive is written from its place in the buffer."""
        if name not in self._kept:
            raise UnsupportedOptimizerError(
                f"state {name!r} for parameter {parameter._zinf_unit.name} appeared after its states were laid out (found then: "
                f"{', '.join(self._kept) or 'none'}): make a new optimizer after changing its flags"
            )
        if name in self._states:
            place = part_of(self._states[name], piece)
            if state.data_ptr() != place.data_ptr():
                place.copy_(state)
            return []
        kept = [(parameter, piece, name, state)]
        if name in self._owner.table.present(parameter, self._optimizer):
            return kept
        self._owner.start_state(parameter, name, state.dtype)
        self._keep(kept, staging)  # at once: what it was made in is let go before there is memory for the next one
        return []

    def _keep(self, kept: Sequence[KeptPiece], staging: Mapping[str, StagingBuffers]) -> list[Pending | None]:
        return self._owner.keep_pieces(kept, staging, self._optimizer, self._buffer.under_way)


def chunk_steps(states: OffloadedStates, optimizer: Optimizer) -> Generator[list[ChunkStep]]:
    """Yield the chunks with gradients, each loaded into its buffer: as many as one call of the optimizer updates."""
    with contextlib.closing(states.load_chunks(optimizer)) as calls:
        for brought in calls:
            yield [ChunkStep(states, number, states.chunks[number], buffer, optimizer) for number, buffer in brought]


def _copied(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Copy a small state; to the host where the part is updated there: PyTorch loads those of fused optimizers to the device."""
    return value.clone() if part.device.type != "cpu" or value.device.type == "cpu" else value.cpu()


def _alias(piece: torch.Tensor) -> torch.Tensor:
    """Return a new tensor object over a piece: the key of its optimizer state."""
    return piece.view(-1)
