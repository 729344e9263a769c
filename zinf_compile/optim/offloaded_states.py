"""Steps whose parameters, gradients or states aren't where they are updated: chunk by chunk, reading ahead, writing behind."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import BudgetError, StepFailedError, StoreError
from zinf_compile.ir.chunk_columns import GRADIENT, VALUE, Column
from zinf_compile.ir.sizes import CHUNK_BUFFERS
from zinf_compile.ir.tiers import Placement
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffer, largest_buffer
from zinf_compile.runtime.transfer.move import Mover, Place, Rooms
from zinf_compile.runtime.units.backing import DriveHome, Home
from zinf_compile.runtime.units.pieces import Piece
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.budget_checks import check_states
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter

from .chunk_transfers import ChunkTransfers
from .chunks import Kept, part_of, plan_chunks
from .load_states import absorb
from .record import record_of
from .shard_state import kept_state, shard_state
from .state_entry import states_of
from .state_exchange import lend
from .state_layout import note, noted
from .state_table import StateTable
from .step_gradient import StepGradient


class OffloadedStates:
    """The steps of some parameters of one optimizer, chunk by chunk, and the states of these wherever they live."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[ShardedParameter],
        kept: Sequence[Kept],
        finish: Callable[[Optimizer], None],
    ) -> None:
        placement = parameters[0]._zinf_unit.placement
        context = parameters[0]._zinf_unit.context
        self.tier = placement.optimizer
        self.context = context
        self.kept = dict(zip(parameters, kept, strict=True))
        self._mover = Mover(context.bridge, update_on_device=placement.update_on_device, lane=lambda: context.lanes.swap)
        self._forward = True
        self._defers = may_defer(placement, kept, unified=context.bridge.unified)
        self._first: list[int] = []
        self._ahead: set[int] = set()
        """Chunks whose states were read for the next step."""
        self.due: Sequence[ShardedParameter] = ()
        """What the last step updates."""
        self.gradients: dict[ShardedParameter, StepGradient] = {}
        """Those that it has still to apply."""
        self.follows = False
        """It may end during the next forward: all that it works on is where nobody else reaches."""
        self._making: dict[tuple[ShardedParameter, str], torch.Tensor] = {}
        on_drive = self.tier == "nvme" and any(kept)
        self.transfers = ChunkTransfers(
            optimizer,
            plan_chunks(parameters, kept, self._mover, self.tier),
            context,
            self._mover,
            placement,
            on_drive=on_drive,
            buffers_for=lambda shapes: self._buffers_within_budget(optimizer, shapes),
        )
        self.chunks = self.transfers.chunks
        self.table = StateTable(
            self.kept,
            self.transfers,
            by_entry=self._defers or on_drive,
            optimizer_name=type(optimizer).__name__,
            lend=lend,
            finish=finish,
        )

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.kept

    @property
    def drive_bytes(self) -> int:
        """Bytes of states on drives."""
        return self.transfers.drive_bytes

    def begin(self, optimizer: Optimizer) -> None:
        """A step begins: take the gradients. What goes wrong here is an error before anything is updated."""
        with self.context.lanes.meter.waiting():
            self._check_last_step(optimizer)
            for parameter in self.kept:
                parameter._zinf_unit.settle()  # it may be another optimizer's as well
            self.transfers.buffers.begin()
            self.absorb(optimizer)
            self._check_gradients()
        pieces = collections.Counter(p for chunk in self.chunks for p, _ in chunk.pieces)
        self.gradients = {p: StepGradient(p, pieces[p]) for p in self.kept if p.grad is not None}
        self.due = list(self.gradients)
        known = all(p in self.table.entries or not self.kept[p] for p in self.due)
        lent = any(entry.lent for entry in self.table.entries.values())  # these are given what the step updates before it returns
        waits = bool(self.due) and known and not lent and all(grad.waits_on_drive for grad in self.gradients.values())
        self.follows = self._defers and waits

    @property
    def chunks_due(self) -> int:
        """How many chunks the step that has begun will update."""
        return len(self._order())

    def pieces_due(self) -> Iterator[tuple[Unit, Piece]]:
        """Yield what the step that has begun will update."""
        for number in self._order():
            for parameter, piece in self.chunks[number].pieces:
                if parameter in self.gradients:
                    yield parameter._zinf_unit, piece

    def bring_chunks(self, optimizer: Optimizer) -> Generator[tuple[int, ChunkBuffer]]:
        """Yield the chunks with gradients, by number; each is in its buffer when it is yielded, and the next one on its way."""
        gradients, due = self.gradients, self._order()
        self._first = due[: len(self.transfers.buffers) - 1]
        self._forward = not self._forward
        self._ahead.clear()
        try:
            for number, following in itertools.zip_longest(due, due[1:]):
                with self.context.lanes.meter.waiting():
                    buffer = self._prepare(number, optimizer)
                    if following is not None and len(self.transfers.buffers) > 1:
                        self._prepare(following, optimizer)
                    buffer.settle()
                buffer.held = True
                yield number, buffer
        except BaseException:
            if self.gradients is gradients:  # not where an error that somebody kept ends this only during a later step
                self.gradients = {}
            with contextlib.suppress(StoreError):
                self.transfers.settle()  # what was read in vain is no concern of the next step's
            raise

    def applied(self, parameter: ShardedParameter) -> None:
        """Let go of a gradient once all its pieces were applied."""
        gradient = self.gradients[parameter]
        gradient.pieces_left -= 1
        if not gradient.pieces_left:
            del self.gradients[parameter]

    def finish(self, optimizer: Optimizer) -> None:
        """The step is over: wait for what goes back to the device, which the next graph uses as it is there.

        Read the states that the next step begins with, where that is known: while forward and backward run there is time.
        """
        with self.context.lanes.meter.waiting():
            if self._defers:
                self._check_last_step(optimizer)
                if self.transfers.store is not None:
                    for number in self._first:
                        self.transfers.buffer_for(number)
                        self._ahead.add(number)
            elif not self._mover.bridge.unified:
                self.transfers.settle()

    def absorb(self, optimizer: Optimizer) -> None:
        """Make what `optimizer.state` says count: move what was loaded to where states live, reset what was taken out."""
        absorb(self.table, optimizer)

    def forget_step(self) -> None:
        """States were loaded: what a step that failed was at counts no more."""
        self.transfers.buffers.begin()

    def count_states(self, optimizer: Optimizer) -> None:
        """Let each parameter that is due have an entry, which the updates that are left will fill."""
        for parameter in self.due if self.table.by_entry else ():
            self.table.entry_of(parameter, optimizer)

    def commit(self, parameter: ShardedParameter, optimizer: Optimizer, memory: Mapping[str, Any], stored: Set[str]) -> None:
        """Make count what a whole step left of a parameter's states: those in memory, and the names of the others."""
        unit = parameter._zinf_unit
        if self.table.by_entry:
            if not (memory or stored or parameter in self.table.entries):
                return
            entry = self.table.entry_of(parameter, optimizer)  # in `optimizer.state` no more, where that was reset meanwhile
            entry.memory = dict(memory)
            entry.stored = set(stored)
            if memory or stored:
                note(entry.memory, unit)
            return
        given = states_of(optimizer, parameter) or {}
        kept = {name: value for name, value in given.items() if name in self.kept[parameter]}
        if kept or memory or self.kept[parameter]:
            optimizer.state[parameter] = {**kept, **memory}
        for name in [name for owner, name in self._making if owner is parameter]:
            value = self._making.pop((parameter, name))
            optimizer.state[parameter][name] = kept_state(value, unit)
        if parameter in optimizer.state:
            optimizer.state[parameter] = noted(optimizer.state[parameter], unit)

    def keep_piece(
        self, parameter: ShardedParameter, piece: Piece, name: str, value: torch.Tensor, rooms: Rooms, optimizer: Optimizer
    ) -> Pending | None:
        """Start to bring one updated column of a piece back."""
        with self.context.lanes.meter.waiting():
            return self._mover.keep(self._place(parameter, piece, name, optimizer), value, _cut(rooms, piece))

    def write(self, number: int, buffer: ChunkBuffer) -> None:
        """Start to write a chunk's states that were changed."""
        if self.transfers.store is not None:
            with self.context.lanes.meter.waiting():
                self.transfers.write(number, buffer)
            self._refresh(number, buffer)
        buffer.filled, buffer.held, buffer.brought = False, False, {}  # gradients in memory go when the caller lets go of them

    def start_state(self, parameter: ShardedParameter, name: str, dtype: torch.dtype) -> None:
        """Make memory for a state that the optimizer begins to keep."""
        unit = parameter._zinf_unit
        device = unit.device if self.tier == "device" or self._mover.bridge.unified else torch.device("cpu")
        if (parameter, name) not in self._making:
            self._making[parameter, name] = torch.zeros(unit.shard_numel, dtype=dtype, device=device)

    def _order(self) -> list[int]:
        """Return the numbers of the chunks to update: opposite to the last step's, or as the next forward uses them."""
        if self._defers:
            order = sorted(range(len(self.chunks)), key=lambda n: min(p._zinf_unit.serial for p, _ in self.chunks[n].pieces))
        else:
            order = list(range(len(self.chunks)))[:: 1 if self._forward else -1]
        return [n for n in order if any(p in self.gradients for p, _ in self.chunks[n].pieces)]

    def _prepare(self, number: int, optimizer: Optimizer) -> ChunkBuffer:
        buffer = self.transfers.buffer_for(number)
        if not buffer.filled:
            buffer.filled = True
            buffer.brought = {}
            rooms = self.transfers.rooms(number, buffer)
            for parameter, piece in self.chunks[number].pieces:
                if parameter not in self.gradients:
                    continue
                names = [VALUE, GRADIENT]
                if not self.table.by_entry:
                    present = self.table.present(parameter, optimizer)
                    names += [name for name in self.kept[parameter] if name in present]
                for name in names:
                    place = self._place(parameter, piece, name, optimizer)
                    buffer.brought[parameter, piece, name], pending = self._mover.bring(place, _cut(rooms[name], piece))
                    if pending is not None:
                        buffer.under_way.append(pending)
        return buffer

    def _place(self, parameter: ShardedParameter, piece: Piece, name: str, optimizer: Optimizer) -> Place:
        unit, start, end = parameter._zinf_unit, piece.start, piece.end
        if name == VALUE:
            if unit.home is None:
                return Place(unit.shard[start:end])
            return _at_home(unit.home, start, end)
        if name == GRADIENT:
            grad = self.gradients[parameter]
            return Place(grad.local().view(-1)[start:end]) if grad.away is None else _at_home(grad.away.home, start, end)
        whole = self._making.get((parameter, name))
        if whole is None:
            whole = shard_state(optimizer.state[parameter][name], unit, name, optimizer).view(-1)
        return Place(whole[start:end], on_device=self.tier == "device")

    def _check_last_step(self, optimizer: Optimizer) -> None:
        """Raise where what the last step updated can't have reached its drive; by now that is over."""
        try:
            self.transfers.settle(but=self._ahead)
        except StoreError:
            record_of(optimizer).mark_ended(
                f"what the last step of {type(optimizer).__name__} updated was lost in part on its way to the drive. Load a "
                "checkpoint of model and optimizer, both from before that step, and go on from there"
            )
            raise

    def _check_gradients(self) -> None:
        """Wait until all gradients have left the device: what failed on the way is an error before anything is updated."""
        for parameter in self.kept:
            grad = parameter.grad
            if isinstance(grad, ShardedGradient) and grad.away is not None:
                try:
                    grad.away.settle()
                except StoreError as error:
                    raise StepFailedError(
                        f"the gradient of {parameter._zinf_unit.name} was lost: nothing is updated yet, parameters and states "
                        f"are as before this step. Cause: {error}"
                    ) from error

    def _buffers_within_budget(self, optimizer: Optimizer, shapes: Sequence[tuple[Mapping[str, Column], int]]) -> int:
        """Return how many chunks may be in memory; raise `BudgetError` where not even one may."""
        self._check_gradients()  # what is still on its way from the device would be counted there
        most = min(self.context.memory.reservations.slots or CHUNK_BUFFERS, len(shapes))
        for count in range(most, 1, -1):
            with contextlib.suppress(BudgetError):
                self._check_budget(optimizer, shapes, count)
                return count
        self._check_budget(optimizer, shapes, 1)
        return 1

    def _check_budget(self, optimizer: Optimizer, shapes: Sequence[tuple[Mapping[str, Column], int]], count: int) -> None:
        context, name = self.context, type(optimizer).__name__
        device, host = (size * count for size in largest_buffer(shapes))
        bytes_of = ((p._zinf_unit.shard_numel, kept) for p, kept in self.kept.items())
        states = sum(numel * dtype.itemsize for numel, kept in bytes_of for dtype in kept.values())
        on_device = states if self.tier == "device" else 0
        on_host = states if self.tier == "host" else 0
        if context.bridge.unified:
            check_states(context, on_device=True, states=on_device + on_host, slots=host, name=name)
        else:
            check_states(context, on_device=True, states=on_device, slots=device, name=name)
            check_states(context, on_device=False, states=on_host, slots=host, name=name)

    def _refresh(self, number: int, buffer: ChunkBuffer) -> None:
        """Let callers who hold a state see what a chunk's update has made of it."""
        if any(entry.lent for entry in self.table.entries.values()):
            views = self.transfers.state_views(number, buffer)
            for parameter, piece in self.chunks[number].pieces:
                entry = self.table.entries.get(parameter)
                for name, copy in entry.lent.items() if entry is not None else ():
                    copy.flat[piece.start : piece.end].copy_(part_of(views[name], piece))


def may_defer(placement: Placement, kept: Sequence[Kept], *, unified: bool) -> bool:
    """Say whether the updates of parameters and states there may wait for the next forward: nobody else has hold of them.

    What is in memory, somebody may look at through a tensor that was had before the step.
    """
    on_drives = placement.params == placement.grads == "nvme" and (placement.optimizer == "nvme" or not any(kept))
    return on_drives and (unified or not placement.update_on_device)


def _at_home(home: Home, start: int, end: int) -> Place:
    if home.resident is not None:
        return Place(home.resident[start:end], on_device=False)
    assert isinstance(home, DriveHome), "what isn't in memory is on a drive"
    return Place(
        read=lambda into: home.read_piece(start, into),
        write=lambda source: home.write_piece(start, source),
    )


def _cut(rooms: Rooms, piece: Piece) -> Rooms:
    return Rooms(*(None if room is None else part_of(room, piece) for room in (rooms.host, rooms.device)))
