"""Transfers of chunks between memory and drives: states are read before a chunk's update and written after it.

Called by `offloaded_states` and the readers of states; knows no optimizer step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch.optim import Optimizer

from zinf_compile.errors import StoreError
from zinf_compile.ir.chunk_columns import Column
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.tiers import Placement
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.link_meter import READ, WRITTEN
from zinf_compile.runtime.storage.stores import ShardStore, open_store
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffer, ChunkBuffers
from zinf_compile.runtime.transfer.move import Location, StagingBuffers, UpdateRoute, there
from zinf_compile.runtime.units.saving import ShardsSave

from .chunks import Chunk


class ChunkTransfers:
    """The chunks of some parameters, buffers for a few of them, and the store of their states on drives.

    `buffers_for(shapes, again)` returns the number of chunk buffers, and is called before they are allocated; `again`: after they
    were freed. It raises `BudgetError` above a cap. `store` is None if states are in memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chunks: Sequence[Chunk],
        context: Context,
        route: UpdateRoute,
        placement: Placement,
        *,
        on_drive: bool,
        buffers_for: Callable[[Sequence[tuple[Mapping[str, Column], int]], bool], int],
    ) -> None:
        self.chunks, self.context, self.route = chunks, context, route
        self._shapes, self._buffers_for = [(chunk.columns, chunk.numel) for chunk in chunks], buffers_for
        most = buffers_for(self._shapes, False)
        self.store = self._lay_out(placement) if on_drive else None
        self._made: list[ChunkBuffers] = []
        """The buffers; none where they were freed. The finalizer sees which there are."""
        self._make(most)
        self._written: set[int] = set()
        self.saving: ShardsSave | None = None
        """The save in the background that has still to write some of the states on drives, perhaps."""
        self.release = weakref.finalize(optimizer, _close, self.store, self._made, context)
        """Free memory and files: runs when the optimizer is collected, or when called."""
        self.release.atexit = False  # the kernel frees files

    @property
    def buffers(self) -> ChunkBuffers:
        """The buffers of chunks, made again where they were freed: as many as graphs have planned for by now."""
        self.make_buffers()
        return self._made[0]

    def make_buffers(self) -> None:
        """Make the buffers again, if they were freed. Raises `BudgetError` above a cap."""
        if not self._made:
            self._make(self._buffers_for(self._shapes, True))

    def begin(self) -> None:
        """Begin a step: parameters and gradients of an earlier one are no longer valid."""
        for buffers in self._made:
            buffers.begin()

    def free_buffers(self) -> None:
        """Wait for all transfers, and free the buffers until chunks are next read or updated."""
        self.drain()
        _free(self._made, self.context)

    @property
    def drive_bytes(self) -> int:
        """Bytes of states on drives."""
        per_chunk = (format_of(dtype).bytes(c.numel) for c in self.chunks for dtype in c.states.values())
        return sum(per_chunk) if self.store is not None else 0

    def staging(self, number: int, buffer: ChunkBuffer) -> dict[str, StagingBuffers]:
        """Return the columns of a chunk in its buffer."""
        chunk = self.chunks[number]
        return buffer.staging(chunk.columns, chunk.numel)

    def state_views(self, number: int, buffer: ChunkBuffer) -> dict[str, torch.Tensor]:
        """Return the states of a chunk that live on drives, in the buffer where they are updated."""
        if self.store is None:
            return {}
        staging, route = self.staging(number, buffer), self.route
        return {
            name: there(staging[name].device if route.device_apart else staging[name].host) for name in self.chunks[number].states
        }

    def buffer_for(self, number: int) -> ChunkBuffer:
        """Return the buffer of a chunk; for a newly assigned one, start reading the states written before."""
        buffer, new = self.buffers.buffer_for(number)
        if new:
            if self.store is not None and number in self._written:
                self._start_reading(number, buffer)
            buffer.chunk = number  # last: after an interrupt or a read error the buffer belongs to no chunk
        return buffer

    def read(self, number: int) -> tuple[ChunkBuffer, dict[str, torch.Tensor]]:
        """Read a chunk's states; return its buffer and the states in it."""
        buffer = self.buffer_for(number)
        buffer.drain()
        return buffer, self.state_views(number, buffer)

    def owner(self, number: int) -> tuple[ChunkTransfers, int]:
        """Return what a save knows a chunk by."""
        return self, number

    def read_part(self, number: int, state: str, start: int, into: torch.Tensor) -> Pending:
        """Start to read a state of a chunk from element `start` on, where a block begins, into memory of a block. Any thread may.

        As it is on the drive: what was written before, and not what is under way in the chunk's buffer.
        """
        store, offset = self.store, format_of(into.dtype).bytes(start)
        assert store is not None, "its states are on a drive"
        reading = store.read(_key(self.chunks[number], state), into, offset=offset)
        return self.context.lanes.meter.follow(READ, into.nbytes, reading, state)

    def offer(self, number: int, buffer: ChunkBuffer) -> None:
        """Let a save in the background have the states of a chunk, which were read to its buffer and are about to be updated."""
        if self.saving is not None and self.store is not None:
            staging = self.staging(number, buffer)
            self._changing(number, {name: there(staging[name].host) for name in self.chunks[number].states})

    def write(self, number: int, buffer: ChunkBuffer) -> None:
        """Start writing the states of a chunk from its buffer."""
        self._changing(number)
        chunk, staging = self.chunks[number], self.staging(number, buffer)
        for name, value in self.state_views(number, buffer).items():
            self.route.keep([(Location(write=self._writer(_key(chunk, name))), value, staging[name])], buffer.under_way)
        self._written.add(number)

    def forget(self, number: int) -> None:
        """Discard a chunk's states, unread; errors of reads in flight are dropped."""
        self._changing(number)
        buffer = self._made[0].find(number) if self._made else None
        if buffer is not None:
            with contextlib.suppress(StoreError):
                buffer.drain()
            buffer.chunk = None
        self._written.discard(number)

    def drain(self, *, but: Container[int | None] = ()) -> None:
        """Wait for all transfers but those of some chunks; then raise the first error."""
        for buffers in self._made:
            buffers.drain(but=but)

    def _make(self, most: int) -> None:
        made = ChunkBuffers(self._shapes, self.context.link, pinned=self.context.device.type != "cpu", most=most)
        _count(made, self.context, 1)
        self._made.append(made)

    def _changing(self, number: int, columns: Mapping[str, torch.Tensor] | None = None) -> None:
        if self.saving is not None:
            self.saving.before_change(self.owner(number), 0, self.chunks[number].numel, columns)

    def _lay_out(self, placement: Placement) -> ShardStore:
        return open_store(
            placement.optimizer,
            placement.nvme,
            [(_key(c, state), format_of(dtype).bytes(c.numel)) for c in self.chunks for state, dtype in c.states.items()],
            self.context.engine,
        )

    def _start_reading(self, number: int, buffer: ChunkBuffer) -> None:
        chunk, staging = self.chunks[number], self.staging(number, buffer)
        for name in chunk.states:
            self.route.bring([(Location(read=self._reader(_key(chunk, name))), staging[name])], buffer.under_way)

    def _reader(self, key: str) -> Callable[[torch.Tensor], Pending]:
        store, meter = self.store, self.context.lanes.meter
        assert store is not None
        return lambda into: meter.follow(READ, into.nbytes, store.read(key, into), key)

    def _writer(self, key: str) -> Callable[[torch.Tensor], Pending]:
        store, meter = self.store, self.context.lanes.meter
        assert store is not None
        return lambda source: meter.follow(WRITTEN, source.nbytes, store.write(key, source), key)


def _key(chunk: Chunk, state: str) -> str:
    return f"{state} of {chunk.name}"


def _free(made: list[ChunkBuffers], context: Context) -> None:
    while made:
        _count(made.pop(), context, -1)


def _count(buffers: ChunkBuffers, context: Context, sign: int) -> None:
    """Count the buffers, or count them no more; each has memory for the largest chunk."""
    memory, number = context.memory, max(1, len(buffers))
    memory.host_ledger.add("states", sign * buffers.host_bytes)
    memory.ledger.add("staging", sign * buffers.device_bytes)
    memory.count_chunk(device=sign * buffers.device_bytes // number, host=sign * buffers.host_bytes // number)


def _close(store: ShardStore | None, made: list[ChunkBuffers], context: Context) -> None:
    _free(made, context)
    if store is not None:
        store.close()
