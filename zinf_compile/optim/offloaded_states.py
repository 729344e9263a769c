"""Chunked steps of parameters, gradients or states that live off the updating device: prefetch, update, write back.

Called by `chunked_step` and `state_dict_hooks`.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import StoreError
from zinf_compile.ir.chunk_columns import GRADIENT, VALUE
from zinf_compile.ir.pieces import Piece
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.memory.aligned_buffers import zeros_on
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffer
from zinf_compile.runtime.transfer.move import Location, StagingBuffers, UpdateRoute
from zinf_compile.runtime.units.saving import ShardsSave
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .calls import group_calls, lies_ready, makes_no_copy
from .chunk_budget import buffers_for
from .chunk_transfers import ChunkTransfers
from .chunks import Kept, cut, part_of, plan_chunks, range_of
from .deferrable import may_defer, may_wait
from .in_place import in_place
from .load_states import reconcile
from .record import record_of
from .shard_state import kept_state, shard_state
from .state_exchange import read_copy
from .state_layout import note, noted
from .state_table import StateTable
from .step_gradient import StepGradient, check_gradients

KeptPiece = tuple[ShardedParameter, Piece, str, torch.Tensor]
"""A piece of a parameter, the name of one of its columns, and that column as it was updated."""


class OffloadedStates:
    """Chunked steps of some parameters of one optimizer, and their states on any tier."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[ShardedParameter],
        kept: Sequence[Kept],
        finish: Callable[[Optimizer], None],
        *,
        counted: Mapping[ShardedParameter, Kept] | None = None,
    ) -> None:
        """`counted`: what is new of the states that are `kept`, for which there has to be room; None: all of them."""
        placement = parameters[0]._zinf_unit.placement
        context = parameters[0]._zinf_unit.context
        self.tier = placement.optimizer
        self.context = context
        self.kept = dict(zip(parameters, kept, strict=True))
        self._route = UpdateRoute(context.link, update_on_device=placement.update_on_device, lane=lambda: context.lanes.swap)
        self._forward, self._finish = True, finish
        self._defers = may_defer(placement, kept, context.link.topology)
        self._first: list[int] = []
        self._ahead: set[int] = set()
        """Chunks whose states were prefetched for the next step."""
        self.due: Sequence[ShardedParameter] = ()
        """Parameters that the last step updates."""
        self.gradients: dict[ShardedParameter, StepGradient] = {}
        """Gradients that it has not applied yet."""
        self._expecting = contextlib.ExitStack()
        """Closed when saves in the background needn't leave anything to the step under way any more."""
        self.deferrable = False
        """The step may be deferred to the next forward: user code can reach none of its inputs (see Note: Deferred step)."""
        self._making: dict[tuple[ShardedParameter, str], torch.Tensor] = {}
        on_drive = not self.tier.in_memory and any(kept)
        self.transfers = ChunkTransfers(
            optimizer,
            plan_chunks(parameters, kept, self._route, self.tier),
            context,
            self._route,
            placement,
            on_drive=on_drive,
            buffers_for=partial(
                buffers_for, context, type(optimizer).__name__, self.tier, self.kept if counted is None else counted
            ),
        )
        self.chunks = self.transfers.chunks
        self._pieces = collections.Counter(p for chunk in self.chunks for p, _ in chunk.pieces)
        self.table = StateTable(
            self.kept,
            self.transfers,
            by_entry=on_drive or (self._defers and not any(kept)),  # nothing in memory but step counts, say
            optimizer_name=type(optimizer).__name__,
            read_copy=read_copy,
            finish=finish,
        )

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.kept

    @property
    def drive_bytes(self) -> int:
        """Bytes of states on drives."""
        return self.transfers.drive_bytes

    def begin(self, optimizer: Optimizer) -> None:
        """Begin a step: snapshot the gradients. Errors here are raised before any update."""
        with self.context.lanes.meter.waiting():
            self._check_last_step(optimizer)
            for parameter in self.kept:
                parameter._zinf_unit.wait_updated()  # another optimizer may have updated it
            self.transfers.begin()
            self.reconcile(optimizer)
            check_gradients(self.kept, may_arrive=self._defers)
            self.transfers.make_buffers()
        found = ((p, p.grad) for p in self.kept)
        self.gradients = {p: StepGradient(p, grad, self._pieces[p]) for p, grad in found if grad is not None}
        self.due = list(self.gradients)
        self.deferrable = self._defers and bool(self.due) and may_wait(optimizer, self.table, self.gradients)
        if not self.deferrable:
            with self.context.lanes.meter.waiting():
                check_gradients(self.kept)
            for gradient in self.gradients.values():
                gradient.order = 0

    @property
    def chunks_due(self) -> int:
        """Number of chunks that the current step will update."""
        return len(self._order())

    def pieces_due(self) -> Iterator[tuple[Hashable, Unit, Piece]]:
        """Yield the units and pieces that the current step will update, with what a save knows their chunk's states by."""
        for number in self._order():
            for _, parameter, piece in self._due_of(number):
                yield self.transfers.owner(number), parameter._zinf_unit, piece

    def load_chunks(self, optimizer: Optimizer) -> Generator[list[tuple[int, ChunkBuffer]]]:
        """Yield the chunks with gradients, by number, call by call; each is loaded in its buffer, the next one in flight."""
        gradients, due = self.gradients, self._order()
        ending = sys.is_finalizing  # a kept error may close this generator when modules are gone
        expecting = self._expect(due)
        self._first = due[: len(self.transfers.buffers) - 1]
        self._forward = not self._forward
        self._ahead.clear()
        try:
            ready = set(filter(self._lies_ready, due))
            joins = {number for number in ready if self._joins(number, optimizer) and not self._arrival(number)}
            calls = group_calls(due, lambda number: self.chunks[number].numel, joins.__contains__)
            for together, following in itertools.zip_longest(calls, calls[1:]):
                with self.context.lanes.meter.waiting():
                    arriving = {p: self.gradients[p] for number in together for _, p, _ in self._due_of(number)}
                    for gradient in sorted(arriving.values(), key=lambda each: -each.order):  # behind the last all are there
                        gradient.wait_arrived()
                    brought = self._bring(together, ready, optimizer)
                    ahead = following is not None and not self._arrival(following[0])
                    if ahead and len(self.transfers.buffers) > 1 and following[0] not in ready:
                        self._prepare(following[0], optimizer)
                    for number, buffer in brought:
                        buffer.reuse() if self._route.device_apart else buffer.drain()  # a device waits by itself
                        self._offer(number, buffer)
                        buffer.held = True
                yield brought
        except BaseException:
            if ending():
                raise
            if self.gradients is gradients:  # unless a kept error closes this generator during a later step
                self.gradients = {}
            with contextlib.suppress(StoreError):
                self.transfers.drain()  # errors of unused prefetches
            raise
        finally:
            if not ending():
                expecting.close()

    def applied(self, parameter: ShardedParameter) -> None:
        """Release a gradient after its last piece."""
        gradient = self.gradients[parameter]
        gradient.pieces_left -= 1
        if not gradient.pieces_left:
            del self.gradients[parameter]

    def finish(self, optimizer: Optimizer) -> None:
        """End a step: wait for copies back to the device, which the next graph reads without waiting.

        Where steps may be deferred, prefetch the states of the next step's first chunks instead, during forward and backward.
        """
        with self.context.lanes.meter.waiting():
            if self._defers:
                self._check_last_step(optimizer)
                if self.transfers.store is not None:
                    for number in self._first:
                        self.transfers.buffer_for(number)
                        self._ahead.add(number)
            elif self._route.link.topology.host_apart:
                self.transfers.drain()

    def reconcile(self, optimizer: Optimizer) -> None:
        """Make the stored states equal to `optimizer.state`, see `load_states.reconcile`."""
        reconcile(self.table, optimizer)

    def forget_step(self) -> None:
        """Discard the buffers of a failed step, after states were loaded."""
        self.transfers.begin()

    def leave_states(self, optimizer: Optimizer, *, creates: bool) -> None:
        """Let `optimizer.state` wait for the remaining updates. `creates`: it gets an entry for each parameter on drives now."""
        if not self.table.by_entry:
            self.table.aside.take(optimizer, self.due, self._finish)
        for parameter in self.due if self.table.by_entry and creates else ():
            self.table.entry_of(parameter, optimizer)

    def commit(self, parameter: ShardedParameter, optimizer: Optimizer, memory: Mapping[str, Any], stored: Set[str]) -> None:
        """Commit a parameter's states after a whole step: those in memory, and the names of those stored."""
        unit = parameter._zinf_unit
        if self.table.by_entry:
            if not (memory or stored or parameter in self.table.entries):
                return
            entry = self.table.entry_of(parameter, optimizer)  # no longer in `optimizer.state` if that was reset meanwhile
            entry.memory = dict(memory)
            entry.stored = set(stored)
            if memory or stored:
                note(entry.memory, unit)
            return
        given = self.table.given(parameter, optimizer) or {}
        kept = {name: value for name, value in given.items() if name in self.kept[parameter]}
        if parameter in self.table.aside:  # a worker has no other way to what is there by now
            self.table.aside.set(parameter, noted({**kept, **memory}, unit))
            return
        if kept or memory or self.kept[parameter]:
            optimizer.state[parameter] = {**kept, **memory}
        for name in [name for owner, name in self._making if owner is parameter]:
            value = self._making.pop((parameter, name))
            optimizer.state[parameter][name] = kept_state(value, unit)
        if parameter in optimizer.state:
            optimizer.state[parameter] = noted(optimizer.state[parameter], unit)

    def keep_pieces(
        self, kept: Sequence[KeptPiece], staging: Mapping[str, StagingBuffers], optimizer: Optimizer, under_way: list[Pending]
    ) -> list[Pending | None]:
        """Start writing back updated columns of pieces, see `UpdateRoute.keep`."""
        with self.context.lanes.meter.waiting():
            rows = [
                (self._location(parameter, piece, name, optimizer), value, cut(staging[name], piece))
                for parameter, piece, name, value in kept
            ]
            return self._route.keep(rows, under_way)

    def write(self, number: int, buffer: ChunkBuffer) -> None:
        """Start writing a chunk's updated states to their drive."""
        if self.transfers.store is not None:
            with self.context.lanes.meter.waiting():
                self.transfers.write(number, buffer)
            self._refresh(number, buffer)
        buffer.filled, buffer.held = False, False
        buffer.brought = {}  # the caller holds the last reference to gradients in memory

    def start_state(self, parameter: ShardedParameter, name: str, dtype: torch.dtype) -> None:
        """Allocate a state that the optimizer has newly created."""
        unit = parameter._zinf_unit
        device = unit.device if self._route.link.topology.side(self.tier) == Tier.DEVICE else torch.device("cpu")
        if (parameter, name) not in self._making:
            self._making[parameter, name] = zeros_on(device, unit.shard_numel, dtype, beside=unit.device)

    def _expect(self, due: Sequence[int]) -> contextlib.ExitStack:
        """Let saves in the background leave to this step what it will read anyway, until what is returned is closed."""
        ending, owners = contextlib.ExitStack(), dict[ShardsSave, list[Hashable]]()
        for number in due:
            if self.transfers.saving is not None:
                owners.setdefault(self.transfers.saving, []).append(self.transfers.owner(number))
            for unit in {p._zinf_unit for p, _ in self.chunks[number].pieces if p in self.gradients}:
                if unit.saving is not None and unit.on_drive:
                    owners.setdefault(unit.saving, []).append(unit)
        for saving, expected in owners.items():
            ending.callback(saving.expect, ending, ())
            saving.expect(ending, expected)
        self._expecting = ending
        return ending

    def stop_expecting(self) -> None:
        """Let saves in the background write all by themselves: the step has failed."""
        self._expecting.close()

    def _offer(self, number: int, buffer: ChunkBuffer) -> None:
        """Let a save in the background have what this chunk's update is about to change, from memory."""
        self.transfers.offer(number, buffer)
        host = self.transfers.staging(number, buffer)[VALUE].host
        for parameter, piece in self.chunks[number].pieces:
            unit = parameter._zinf_unit
            if unit.saving is not None and parameter in self.gradients:
                columns = {VALUE: part_of(host, piece)} if host is not None and unit.on_drive else None
                unit.saving.before_change(unit, piece.start, piece.end, columns, piece.start)

    def next_order(self) -> list[int]:
        """Return all chunks as the next step will take them: reverse of the last step's order, or that of the next forward.

        Before that forward, small parameters are first: see `cut_chunks`.
        """
        if self._defers:
            return sorted(range(len(self.chunks)), key=lambda number: self.chunks[number].first_need)
        return list(range(len(self.chunks)))[:: 1 if self._forward else -1]

    def _order(self) -> list[int]:
        """Return the chunks to update: those first whose gradients are there, the others as these arrive."""
        order = self.next_order()
        return sorted((n for n in order if any(p in self.gradients for p, _ in self.chunks[n].pieces)), key=self._arrival)

    def _arrival(self, number: int) -> int:
        """Return 0 for a chunk whose gradients were there when the step began; else the order in which others can begin."""
        return max((self.gradients[parameter].order for _, parameter, _ in self._due_of(number)), default=0)

    def _joins(self, number: int, optimizer: Optimizer) -> bool:
        """Say whether a chunk that lies ready may be updated with others."""
        complete = all(len(self.table.present(p, optimizer)) == len(self.kept[p]) for _, p, _ in self._due_of(number))
        return complete and makes_no_copy(self.chunks[number], optimizer)

    def _lies_ready(self, number: int) -> bool:
        """Say whether all that a chunk's update reads and changes is in the memory where it is updated."""
        due = (self.gradients[parameter] for _, parameter, _ in self._due_of(number))
        return lies_ready(self.chunks[number], due, device_apart=self._route.device_apart)

    def _due_of(self, number: int) -> list[tuple[int, ShardedParameter, Piece]]:
        """Return a chunk's pieces that have gradients, each behind its number in the chunk."""
        return [(place, *row) for place, row in enumerate(self.chunks[number].pieces) if row[0] in self.gradients]

    def _bring(self, together: Sequence[int], ready: Set[int], optimizer: Optimizer) -> list[tuple[int, ChunkBuffer]]:
        """Return the chunks of one call with their buffers: one alone, or some that lie ready."""
        if not ready >= set(together):
            return [(number, self._prepare(number, optimizer)) for number in together]
        due = [self._due_of(number) for number in together]
        return list(zip(together, in_place(due, self.gradients, self.table, optimizer, self._route.link), strict=True))

    def _prepare(self, number: int, optimizer: Optimizer) -> ChunkBuffer:
        buffer = self.transfers.buffer_for(number)
        if not buffer.filled:
            buffer.filled = True
            buffer.brought = {}
            staging = self.transfers.staging(number, buffer)
            rows: list[tuple[int, str]] = []
            places: list[tuple[Location, StagingBuffers]] = []
            for place, parameter, piece in self._due_of(number):
                names = [VALUE, GRADIENT]
                if not self.table.by_entry:
                    present = self.table.present(parameter, optimizer)
                    names += [name for name in self.kept[parameter] if name in present]
                for name in names:
                    rows.append((place, name))
                    places.append((self._location(parameter, piece, name, optimizer), cut(staging[name], piece)))
            for (place, name), there in zip(rows, self._route.bring(places, buffer.under_way), strict=True):
                buffer.brought.setdefault(place, {})[name] = there
        return buffer

    def _location(self, parameter: ShardedParameter, piece: Piece, name: str, optimizer: Optimizer) -> Location:
        unit, start, end = parameter._zinf_unit, piece.start, piece.end
        if name == VALUE:
            if unit.backing is None:
                return Location(unit.shard[start:end])
            return unit.backing.location(start, end)
        if name == GRADIENT:
            grad = self.gradients[parameter]
            return (
                Location(range_of(grad.local(), start, end))
                if grad.offloaded is None
                else grad.offloaded.backing.location(start, end)
            )
        whole = self._making.get((parameter, name))
        if whole is None:
            whole = shard_state(self.table.given(parameter, optimizer)[name], unit, name, optimizer)
        return Location(range_of(whole, start, end), on_device=self.tier == Tier.DEVICE)

    def _check_last_step(self, optimizer: Optimizer) -> None:
        """Wait for the last step's writes; raise if one failed."""
        try:
            self.transfers.drain(but=self._ahead)
        except StoreError:
            record = record_of(optimizer)
            record.mark_ended(
                f"what the last step of {type(optimizer).__name__} updated was lost in part while it was written to the drive. "
                f"Load a checkpoint of model and optimizer, both from before that step, and go on from there{record.way_back}"
            )
            raise

    def _refresh(self, number: int, buffer: ChunkBuffer) -> None:
        """Let callers who hold a state see what a chunk's update has made of it."""
        if any(entry.copies for entry in self.table.entries.values()):
            views = self.transfers.state_views(number, buffer)
            for parameter, piece in self.chunks[number].pieces:
                entry = self.table.entries.get(parameter)
                for name, copy in entry.copies.items() if entry is not None else ():
                    self._route.copy_out(part_of(views[name], piece), copy.flat[piece.start : piece.end])
