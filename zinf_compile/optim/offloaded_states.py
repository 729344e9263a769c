"""Steps whose parameters, gradients or states aren't where they are updated: chunk by chunk, reading ahead, writing behind."""

from __future__ import annotations

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import BudgetError, StepFailedError, StoreError
from zinf_compile.ir.tiers import Placement
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.link_meter import READ, WRITTEN
from zinf_compile.runtime.storage.extent_store import Store
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.transfer.chunk_buffers import SLOTS, ChunkSlots, Column, Slot, slot_bytes
from zinf_compile.runtime.transfer.move import Mover, Place, Rooms
from zinf_compile.runtime.units.backing import DriveHome, Home
from zinf_compile.runtime.units.pieces import Piece
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.budget import check_states
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter

from .chunk_step import ChunkStep, part_of
from .chunks import GRADIENT, VALUE, Chunk, Kept, plan_chunks
from .shard_state import kept_state, shard_state
from .state_entry import StateEntry, in_memory, states_of
from .state_exchange import absorb, lend
from .state_layout import note, noted, without_note
from .step_gradient import Taken


class StreamedStates:
    """The chunks of some parameters of one optimizer, and the states of these that live on drives.

    `optimizer.state` keeps what is in memory: what is not of a parameter's size, such as step counts, and where the tier of
    states isn't a drive all of them. For what is on drives a parameter has a `StateEntry` there; it has states for as long as
    that is in `optimizer.state`.
    """

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
        self._optimizer_name = type(optimizer).__name__
        self.kept = dict(zip(parameters, kept, strict=True))
        self._mover = Mover(context.bridge, update_on_device=placement.update_on_device, lane=lambda: context.swap_lane)
        self.chunks = plan_chunks(parameters, kept, self._mover, self.tier)
        self.entries: dict[ShardedParameter, StateEntry] = {}
        """Of the parameters that have states; as in `optimizer.state` since `absorb` compared them."""
        self.brought: dict[ShardedParameter, dict[str, Any]] = {}
        """What stands there instead while `state_dict` is taken."""
        self._wait_for_updates = finish
        self._written: set[int] = set()
        self._forward = True
        self._late = may_be_late(placement, kept, unified=context.bridge.unified)
        self.by_entry = self._late or (self.tier == "nvme" and any(kept))
        """Whether `optimizer.state` has a `StateEntry` for each parameter."""
        self._first: list[int] = []
        self._ahead: set[int] = set()
        """Chunks whose states were read for the next step."""
        self.due: Sequence[ShardedParameter] = ()
        """What the last step updates."""
        self.taken: dict[ShardedParameter, Taken] = {}
        """The gradients that it has still to apply."""
        self.follows = False
        """It may end during the next forward: all that it works on is where nobody else reaches."""
        self._making: dict[tuple[ShardedParameter, str], torch.Tensor] = {}
        shapes = [(chunk.columns, chunk.numel) for chunk in self.chunks]
        most = self._slots_within_budget(optimizer, shapes)
        self.store = self._lay_out(placement.nvme) if self.tier == "nvme" and any(kept) else None
        self._slots = ChunkSlots(
            shapes,
            context.bridge,
            pinned=context.device.type == "cuda",
            most=most,
        )
        context.host_ledger.add("states", self._slots.host_bytes)
        context.ledger.add("staged", self._slots.device_bytes)
        self.let_go = weakref.finalize(optimizer, _close, self.store, self._slots, context)
        """Give back memory and files: by itself when the optimizer goes, or when this is called."""
        self.let_go.atexit = False  # the kernel frees files

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.kept

    @property
    def drive_bytes(self) -> int:
        """Bytes of states on drives."""
        per_chunk = (c.numel * dtype.itemsize for c in self.chunks for dtype in c.states.values())
        return sum(per_chunk) if self.store is not None else 0

    def begin(self, optimizer: Optimizer) -> None:
        """A step begins: take the gradients. What goes wrong here is an error before anything is updated."""
        with self.context.meter.waiting():
            self._check_last_step(optimizer)
            for parameter in self.kept:
                parameter._zinf_unit.settle()  # it may be another optimizer's as well
            self._slots.begin()
            self.absorb(optimizer)
            self._check_gradients()
        pieces = collections.Counter(p for chunk in self.chunks for p, _ in chunk.pieces)
        self.taken = {p: Taken(p, pieces[p]) for p in self.kept if p.grad is not None}
        self.due = list(self.taken)
        known = all(p in self.entries or not self.kept[p] for p in self.due)
        lent = any(entry.lent for entry in self.entries.values())  # these are given what the step updates before it returns
        waits = bool(self.due) and known and not lent and all(taken.waits_on_drive for taken in self.taken.values())
        self.follows = self._late and waits

    @property
    def chunks_due(self) -> int:
        """How many chunks the step that has begun will update."""
        return len(self._order())

    def pieces_due(self) -> Iterator[tuple[Unit, Piece]]:
        """Yield what the step that has begun will update."""
        for number in self._order():
            for parameter, piece in self.chunks[number].pieces:
                if parameter in self.taken:
                    yield parameter._zinf_unit, piece

    def chunk_steps(self, optimizer: Optimizer) -> Iterator[ChunkStep]:
        """Yield the chunks with gradients; each is brought when it is yielded."""
        taken, due = self.taken, self._order()
        self._first = due[: len(self._slots) - 1]
        self._forward = not self._forward
        self._ahead.clear()
        try:
            for number, following in itertools.zip_longest(due, due[1:]):
                with self.context.meter.waiting():
                    slot = self._prepare(number, optimizer)
                    if following is not None and len(self._slots) > 1:
                        self._prepare(following, optimizer)
                    slot.settle()
                slot.held = True
                yield ChunkStep(self, number, self.chunks[number], slot, optimizer)
        except BaseException:
            if self.taken is taken:  # not where an error that somebody kept ends this only during a later step
                self.taken = {}
            with contextlib.suppress(StoreError):
                self._slots.settle()  # what was read in vain is no concern of the next step's
            raise

    def applied(self, parameter: ShardedParameter) -> None:
        """Let go of a gradient once all its pieces were applied."""
        taken = self.taken[parameter]
        taken.pieces -= 1
        if not taken.pieces:
            del self.taken[parameter]

    def finish(self, optimizer: Optimizer) -> None:
        """The step is over: wait for what goes back to the device, which the next graph uses as it is there.

        Read the states that the next step begins with, where that is known: while forward and backward run there is time.
        """
        with self.context.meter.waiting():
            if self._late:
                self._check_last_step(optimizer)
                if self.store is not None:
                    for number in self._first:
                        self._slot_for(number)
                        self._ahead.add(number)
            elif not self._mover.bridge.unified:
                self._slots.settle()

    @property
    def parameters(self) -> Sequence[ShardedParameter]:
        """Those whose states these are."""
        return list(self.kept)

    @property
    def updating(self) -> bool:
        """Whether a chunk is being updated."""
        return self._slots.held

    def absorb(self, optimizer: Optimizer) -> None:
        """Make what `optimizer.state` says count: move what was loaded to where states live, reset what was taken out."""
        if self.by_entry:
            absorb(self, optimizer)
        else:
            self._bring_home(optimizer)

    def forget_step(self) -> None:
        """States were loaded: what a step that failed was at counts no more."""
        self._slots.begin()

    def lend(self, entry: StateEntry, name: str) -> torch.Tensor:
        """Return one state of a parameter as a tensor whose changes count."""
        return lend(self, entry, name, self._optimizer_name)

    def new_entry(self, optimizer: Optimizer, parameter: ShardedParameter, memory: Mapping[str, Any]) -> StateEntry:
        """Return an entry for `optimizer.state`, none of whose states is on the drive."""
        return StateEntry(optimizer, self, parameter, memory, self._wait_for_updates)

    def order_of(self, parameter: ShardedParameter) -> Iterator[str]:
        """Yield the names of a parameter's states that the drive has room for."""
        return iter(self.kept[parameter])

    def present(self, parameter: ShardedParameter, optimizer: Optimizer) -> Set[str]:
        """Return the names of a parameter's states that the next update goes on from."""
        if self.by_entry:
            entry = self.entries.get(parameter)
            return entry.stored if entry is not None else frozenset()
        given = states_of(optimizer, parameter) or {}
        return {name for name in self.kept[parameter] if isinstance(given.get(name), torch.Tensor)}

    def other_states(self, parameter: ShardedParameter, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return those of a parameter's states that aren't brought; None where it has no states at all."""
        given = self.entries.get(parameter) if self.by_entry else states_of(optimizer, parameter)
        if given is None:
            return None
        present = self.present(parameter, optimizer)
        return {name: value for name, value in without_note(in_memory(given)).items() if name not in present}

    def count_states(self, optimizer: Optimizer) -> None:
        """Let each parameter that is due have an entry, which the updates that are left will fill."""
        for parameter in self.due:
            if self.by_entry and parameter not in self.entries:
                entry = self.entries[parameter] = self.new_entry(optimizer, parameter, {})
                optimizer.state[parameter] = entry

    def settle(self, parameter: ShardedParameter, optimizer: Optimizer, memory: Mapping[str, Any], stored: Set[str]) -> None:
        """Make count what a whole step left of a parameter's states: those in memory, and the names of the others."""
        unit = parameter._zinf_unit
        if self.by_entry:
            if not (memory or stored or parameter in self.entries):
                return
            if parameter not in self.entries:
                self.entries[parameter] = self.new_entry(optimizer, parameter, {})
                optimizer.state[parameter] = self.entries[parameter]
            entry = self.entries[parameter]  # in `optimizer.state` no more, where that was reset meanwhile
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

    def bring_piece(self, parameter: ShardedParameter, piece: Piece, name: str, rooms: Rooms, optimizer: Optimizer) -> Any:
        """Start to bring one column of a piece; return where it will be, and what to wait for."""
        return self._mover.bring(self._place(parameter, piece, name, optimizer), _cut(rooms, piece))

    def keep_piece(
        self, parameter: ShardedParameter, piece: Piece, name: str, value: torch.Tensor, rooms: Rooms, optimizer: Optimizer
    ) -> Pending | None:
        """Start to bring one updated column of a piece back."""
        with self.context.meter.waiting():
            return self._mover.keep(self._place(parameter, piece, name, optimizer), value, _cut(rooms, piece))

    def write(self, number: int, slot: Slot) -> None:
        """Start to write a chunk's states that were changed."""
        if self.store is not None:
            with self.context.meter.waiting():
                self.write_chunk(number, slot)
            self._refresh(number, slot)
        slot.filled, slot.held, slot.brought = False, False, {}  # gradients in memory go when the caller lets go of them

    def rooms(self, number: int, slot: Slot) -> dict[str, Rooms]:
        """Return the columns of a chunk in its slot."""
        chunk = self.chunks[number]
        return slot.rooms(chunk.columns, chunk.numel)

    def state_views(self, number: int, slot: Slot) -> dict[str, torch.Tensor]:
        """Return the states of a chunk that come from drives, where they are updated."""
        if self.store is None:
            return {}
        rooms, mover = self.rooms(number, slot), self._mover
        on_device = mover.update_on_device and not mover.bridge.unified
        return {name: _there(rooms[name].device if on_device else rooms[name].host) for name in self.chunks[number].states}

    def _order(self) -> list[int]:
        """Return the numbers of the chunks to update: opposite to the last step's, or as the next forward uses them."""
        if self._late:
            order = sorted(range(len(self.chunks)), key=lambda n: min(p._zinf_unit.serial for p, _ in self.chunks[n].pieces))
        else:
            order = list(range(len(self.chunks)))[:: 1 if self._forward else -1]
        return [n for n in order if any(p in self.taken for p, _ in self.chunks[n].pieces)]

    def _prepare(self, number: int, optimizer: Optimizer) -> Slot:
        slot = self._slot_for(number)
        if not slot.filled:
            slot.filled = True
            slot.brought = {}
            rooms = self.rooms(number, slot)
            for parameter, piece in self.chunks[number].pieces:
                if parameter not in self.taken:
                    continue
                names = [VALUE, GRADIENT]
                if not self.by_entry:
                    present = self.present(parameter, optimizer)
                    names += [name for name in self.kept[parameter] if name in present]
                for name in names:
                    value, pending = self.bring_piece(parameter, piece, name, rooms[name], optimizer)
                    slot.brought[parameter, piece, name] = value
                    if pending is not None:
                        slot.under_way.append(pending)
        return slot

    def _place(self, parameter: ShardedParameter, piece: Piece, name: str, optimizer: Optimizer) -> Place:
        unit, start, end = parameter._zinf_unit, piece.start, piece.end
        if name == VALUE:
            if unit.home is None:
                return Place(unit.shard[start:end])
            return _at_home(unit.home, start, end)
        if name == GRADIENT:
            grad = self.taken[parameter]
            return Place(grad.local().view(-1)[start:end]) if grad.away is None else _at_home(grad.away.home, start, end)
        whole = self._making.get((parameter, name))
        if whole is None:
            whole = shard_state(optimizer.state[parameter][name], unit, name, optimizer).view(-1)
        return Place(whole[start:end], on_device=self.tier == "device")

    def start_state(self, parameter: ShardedParameter, name: str, dtype: torch.dtype) -> None:
        """Make memory for a state that the optimizer begins to keep."""
        unit = parameter._zinf_unit
        device = unit.device if self.tier == "device" or self._mover.bridge.unified else torch.device("cpu")
        if (parameter, name) not in self._making:
            self._making[parameter, name] = torch.zeros(unit.shard_numel, dtype=dtype, device=device)

    def _check_last_step(self, optimizer: Optimizer) -> None:
        """Raise where what the last step updated can't have reached its drive; by now that is over."""
        try:
            self._slots.settle(but=self._ahead)
        except StoreError:
            torn[optimizer] = (
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

    def _bring_home(self, optimizer: Optimizer) -> None:
        """Make states that were just loaded what a step changes in place: this rank's, in the memory of their tier."""
        for parameter in self.kept:
            names, unit = self.present(parameter, optimizer), parameter._zinf_unit
            if not names:
                continue
            state = dict(optimizer.state[parameter])
            leaves = self.tier == "host" and not self._mover.bridge.unified and unit.device.type != "cpu"
            for name in names:
                value = shard_state(state[name], unit, name, optimizer)
                state[name] = kept_state(value.cpu() if leaves else value, unit)
            optimizer.state[parameter] = noted(state, unit)

    def _slots_within_budget(self, optimizer: Optimizer, shapes: Sequence[tuple[Mapping[str, Column], int]]) -> int:
        """Return how many chunks may be in memory; raise `BudgetError` where not even one may."""
        self._check_gradients()  # what is still on its way from the device would be counted there
        most = min(self.context.claims.slots or SLOTS, len(shapes))
        for count in range(most, 1, -1):
            with contextlib.suppress(BudgetError):
                self._check_budget(optimizer, shapes, count)
                return count
        self._check_budget(optimizer, shapes, 1)
        return 1

    def _check_budget(self, optimizer: Optimizer, shapes: Sequence[tuple[Mapping[str, Column], int]], count: int) -> None:
        context, name = self.context, type(optimizer).__name__
        host, device = (size * count for size in slot_bytes(shapes))
        bytes_of = ((p._zinf_unit.shard_numel, kept) for p, kept in self.kept.items())
        states = sum(numel * dtype.itemsize for numel, kept in bytes_of for dtype in kept.values())
        on_device = states if self.tier == "device" else 0
        on_host = states if self.tier == "host" else 0
        if context.bridge.unified:
            check_states(context, on_device=True, states=on_device + on_host, slots=host, name=name)
        else:
            check_states(context, on_device=True, states=on_device, slots=device, name=name)
            check_states(context, on_device=False, states=on_host, slots=host, name=name)

    def _lay_out(self, folders: Sequence[str]) -> Store:
        return Store(
            folders,
            [(_key(c, state), c.numel * dtype.itemsize) for c in self.chunks for state, dtype in c.states.items()],
            engine=self.context.engine,
        )

    def _start_reading(self, number: int, slot: Slot) -> None:
        assert self.store is not None
        chunk, rooms = self.chunks[number], self.rooms(number, slot)
        for name in chunk.states:
            _, pending = self._mover.bring(Place(read=self._reader(_key(chunk, name))), rooms[name])
            if pending is not None:
                slot.under_way.append(pending)

    def read(self, number: int) -> tuple[Slot, dict[str, torch.Tensor]]:
        """Return the slot of a chunk and its states there, read."""
        slot = self._slot_for(number)
        slot.settle()
        return slot, self.state_views(number, slot)

    def _slot_for(self, number: int) -> Slot:
        slot, new = self._slots.slot_for(number)
        if new:
            if self.store is not None and number in self._written:
                self._start_reading(number, slot)
            slot.chunk = number  # not before: an interrupt, or a block that can't be read, leaves it with neither
        return slot

    def write_chunk(self, number: int, slot: Slot) -> None:
        """Start to write the states of a chunk in its slot."""
        assert self.store is not None
        chunk, rooms = self.chunks[number], self.rooms(number, slot)
        for name, value in self.state_views(number, slot).items():
            pending = self._mover.keep(Place(write=self._writer(_key(chunk, name))), value, rooms[name])
            if pending is not None:
                slot.under_way.append(pending)
        self._written.add(number)

    def _refresh(self, number: int, slot: Slot) -> None:
        """Let callers who hold a state see what a chunk's update has made of it."""
        if any(entry.lent for entry in self.entries.values()):
            views = self.state_views(number, slot)
            for parameter, piece in self.chunks[number].pieces:
                entry = self.entries.get(parameter)
                for name, copy in entry.lent.items() if entry is not None else ():
                    copy.flat[piece.start : piece.end].copy_(part_of(views[name], piece))

    def _reader(self, key: str) -> Callable[[torch.Tensor], Pending]:
        store, meter = self.store, self.context.meter
        assert store is not None
        return lambda into: meter.follow(READ, into.nbytes, store.read(key, into))

    def _writer(self, key: str) -> Callable[[torch.Tensor], Pending]:
        store, meter = self.store, self.context.meter
        assert store is not None
        return lambda source: meter.follow(WRITTEN, source.nbytes, store.write(key, source))

    def forget_chunk(self, number: int) -> None:
        """Make a chunk's states as if never written, whatever the drive would say of them."""
        slot = self._slots.find(number)
        if slot is not None:
            with contextlib.suppress(StoreError):
                slot.settle()
            slot.chunk = None
        self._written.discard(number)

    def settle_slots(self) -> None:
        """Wait until nothing moves; raise the first error."""
        self._slots.settle()


def may_be_late(placement: Placement, kept: Sequence[Kept], *, unified: bool) -> bool:
    """Say whether the updates of parameters and states there may wait for the next forward: nobody else has hold of them.

    What is in memory, somebody may look at through a tensor that was had before the step.
    """
    on_drives = placement.params == placement.grads == "nvme" and (placement.optimizer == "nvme" or not any(kept))
    return on_drives and (unified or not placement.update_on_device)


def _there(room: torch.Tensor | None) -> torch.Tensor:
    assert room is not None, "a column that comes from a drive has room"
    return room


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


def _key(chunk: Chunk, state: str) -> str:
    return f"{state} of {chunk.name}"


def _close(store: Store | None, slots: ChunkSlots, context: Context) -> None:
    context.host_ledger.add("states", -slots.host_bytes)
    context.ledger.add("staged", -slots.device_bytes)
    if store is not None:
        store.close()


torn: weakref.WeakKeyDictionary[Optimizer, str] = process_wide(weakref.WeakKeyDictionary())
"""Optimizers of which a step ended in the middle of its chunks, and what to say of them."""


def tear(optimizer: Optimizer, chunks: int) -> None:
    """Note that from now on, until the step is over, some of it is done and some is not."""
    torn[optimizer] = (
        f"a step of {type(optimizer).__name__} ended in the middle, at chunk {chunks}: some parameters and states are updated, "
        "others are not. Load a checkpoint of model and optimizer, both from before this step, and go on from there"
    )


def spoil(optimizer: Optimizer) -> None:
    """A step ended in its middle: nobody may compute with what it was to update, until that is loaded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, ShardedParameter) and parameter.grad is not None:
                parameter._zinf_unit.spoil(torn[optimizer])
