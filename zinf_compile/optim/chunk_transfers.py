"""Chunks between memory and drives: the states that live there are read ahead of a chunk's update and written behind it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch.optim import Optimizer

from zinf_compile.errors import StoreError
from zinf_compile.ir.chunk_columns import Column
from zinf_compile.ir.tiers import Placement
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.link_meter import READ, WRITTEN
from zinf_compile.runtime.storage.extent_store import Store
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffer, ChunkBuffers
from zinf_compile.runtime.transfer.move import Mover, Place, Rooms

from .chunks import Chunk


class ChunkTransfers:
    """The chunks of some parameters, buffers for a few of them, and the store of their states on drives.

    `buffers_for(shapes)` returns for how many chunks there are buffers; it is asked before anything is made, and refuses what
    exceeds a cap. `store` is None where states are in memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chunks: Sequence[Chunk],
        context: Context,
        mover: Mover,
        placement: Placement,
        *,
        on_drive: bool,
        buffers_for: Callable[[Sequence[tuple[Mapping[str, Column], int]]], int],
    ) -> None:
        self.chunks, self.context, self._mover = chunks, context, mover
        shapes = [(chunk.columns, chunk.numel) for chunk in chunks]
        most = buffers_for(shapes)
        self.store = self._lay_out(placement.nvme) if on_drive else None
        self.buffers = ChunkBuffers(shapes, context.bridge, pinned=context.device.type == "cuda", most=most)
        self._written: set[int] = set()
        context.memory.host_ledger.add("states", self.buffers.host_bytes)
        context.memory.ledger.add("staged", self.buffers.device_bytes)
        self.let_go = weakref.finalize(optimizer, _close, self.store, self.buffers, context)
        """Give back memory and files: by itself when the optimizer goes, or when this is called."""
        self.let_go.atexit = False  # the kernel frees files

    @property
    def drive_bytes(self) -> int:
        """Bytes of states on drives."""
        per_chunk = (c.numel * dtype.itemsize for c in self.chunks for dtype in c.states.values())
        return sum(per_chunk) if self.store is not None else 0

    def rooms(self, number: int, buffer: ChunkBuffer) -> dict[str, Rooms]:
        """Return the columns of a chunk in its buffer."""
        chunk = self.chunks[number]
        return buffer.rooms(chunk.columns, chunk.numel)

    def state_views(self, number: int, buffer: ChunkBuffer) -> dict[str, torch.Tensor]:
        """Return the states of a chunk that come from drives, where they are updated."""
        if self.store is None:
            return {}
        rooms, mover = self.rooms(number, buffer), self._mover
        on_device = mover.update_on_device and not mover.bridge.unified
        return {name: _there(rooms[name].device if on_device else rooms[name].host) for name in self.chunks[number].states}

    def buffer_for(self, number: int) -> ChunkBuffer:
        """Return the buffer of a chunk; a new one begins to be given the states that were written of it."""
        buffer, new = self.buffers.buffer_for(number)
        if new:
            if self.store is not None and number in self._written:
                self._start_reading(number, buffer)
            buffer.chunk = number  # not before: an interrupt, or a block that can't be read, leaves it with neither
        return buffer

    def read(self, number: int) -> tuple[ChunkBuffer, dict[str, torch.Tensor]]:
        """Return the buffer of a chunk and its states there, read."""
        buffer = self.buffer_for(number)
        buffer.settle()
        return buffer, self.state_views(number, buffer)

    def write(self, number: int, buffer: ChunkBuffer) -> None:
        """Start to write the states of a chunk in its buffer."""
        chunk, rooms = self.chunks[number], self.rooms(number, buffer)
        for name, value in self.state_views(number, buffer).items():
            pending = self._mover.keep(Place(write=self._writer(_key(chunk, name))), value, rooms[name])
            if pending is not None:
                buffer.under_way.append(pending)
        self._written.add(number)

    def forget(self, number: int) -> None:
        """Make a chunk's states as if never written, whatever the drive would say of them."""
        buffer = self.buffers.find(number)
        if buffer is not None:
            with contextlib.suppress(StoreError):
                buffer.settle()
            buffer.chunk = None
        self._written.discard(number)

    def settle(self, *, but: Container[int | None] = ()) -> None:
        """Wait until nothing moves, but for some chunks; then raise the first error."""
        self.buffers.settle(but=but)

    def _lay_out(self, folders: Sequence[str]) -> Store:
        return Store(
            folders,
            [(_key(c, state), c.numel * dtype.itemsize) for c in self.chunks for state, dtype in c.states.items()],
            engine=self.context.engine,
        )

    def _start_reading(self, number: int, buffer: ChunkBuffer) -> None:
        chunk, rooms = self.chunks[number], self.rooms(number, buffer)
        for name in chunk.states:
            _, pending = self._mover.bring(Place(read=self._reader(_key(chunk, name))), rooms[name])
            if pending is not None:
                buffer.under_way.append(pending)

    def _reader(self, key: str) -> Callable[[torch.Tensor], Pending]:
        store, meter = self.store, self.context.lanes.meter
        assert store is not None
        return lambda into: meter.follow(READ, into.nbytes, store.read(key, into))

    def _writer(self, key: str) -> Callable[[torch.Tensor], Pending]:
        store, meter = self.store, self.context.lanes.meter
        assert store is not None
        return lambda source: meter.follow(WRITTEN, source.nbytes, store.write(key, source))


def _there(room: torch.Tensor | None) -> torch.Tensor:
    assert room is not None, "a column that comes from a drive has room"
    return room


def _key(chunk: Chunk, state: str) -> str:
    return f"{state} of {chunk.name}"


def _close(store: Store | None, buffers: ChunkBuffers, context: Context) -> None:
    context.memory.host_ledger.add("states", -buffers.host_bytes)
    context.memory.ledger.add("staged", -buffers.device_bytes)
    if store is not None:
        store.close()
