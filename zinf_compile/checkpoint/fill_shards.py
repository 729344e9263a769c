"""Fills shards from a checkpoint: the next pieces are read while the last ones are written, a few of them in memory at a time.

Called by `load` and `accumulated_gradients`; states of optimizers are read ahead in the same way.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.memory.inflight import InflightQueue
from zinf_compile.runtime.units.shard_values import pieces_of
from zinf_compile.runtime.units.unit import Unit

from .shard_reader import ShardReader, ShardReading

_BYTES_AHEAD = 16 << 20
"""Of pieces that are read while the one before them is used; one piece at least."""

_BYTES_WRITTEN = 32 << 20
"""Of pieces that are being written; one at least."""

T = TypeVar("T")


class ShardToFill(NamedTuple):
    """One shard."""

    reader: ShardReader
    unit: Unit
    """Whose pieces are those of the shard."""
    dtype: torch.dtype
    write: Callable[[int, torch.Tensor], Pending]
    """Starts to keep a piece of host memory from an element on."""
    resident: torch.Tensor | None = None
    """The shard, where it is in memory, to be filled there."""


def read_ahead(wanted: Iterable[T], begin: Callable[[T], ShardReading], size: Callable[[T], int]) -> Iterator[ShardReading]:
    """Yield the reading of each thing that is wanted, in order; those after it are begun already, up to some bytes."""
    coming = iter(wanted)
    begun: collections.deque[tuple[ShardReading, int]] = collections.deque()
    ahead = 0
    while True:
        while (not begun or ahead < _BYTES_AHEAD) and (one := next(coming, None)) is not None:
            begun.append((begin(one), size(one)))
            ahead += begun[-1][1]
        if not begun:
            return
        reading, count = begun.popleft()
        ahead -= count
        yield reading


def fill_shards(shards: Iterable[ShardToFill]) -> None:
    """Read this rank's elements of saved tensors to where they are kept; return when all are there."""
    planned = [(shard, start, end) for shard in shards for start, end in pieces_of(shard.unit)]
    readings = read_ahead(
        planned,
        lambda one: one[0].reader.begin(one[1], one[2]),
        lambda one: format_of(one[0].dtype).bytes(one[2] - one[1]),
    )
    pool, writing = BufferPool(_BYTES_WRITTEN), InflightQueue(_BYTES_WRITTEN)
    try:
        for (shard, start, end), reading in zip(planned, readings, strict=True):
            if shard.resident is not None:
                piece = shard.resident[start:end]
                shard.unit.context.link.wait_read(piece)
                reading.finish(piece)
                continue
            size = format_of(shard.dtype).bytes(end - start)
            writing.make_room(size)
            buffer = pool.take(size)
            assert buffer is not None, "no more is out than the pool may have"
            piece = buffer[:size].view(shard.dtype)
            reading.finish(piece)
            writing.add(_Written(shard.write(start, piece), pool, buffer), buffer.nbytes)
        writing.drain()
    finally:
        writing.abandon()
        pool.close()


class _Written:
    """A piece that is being written; its buffer goes back when somebody has waited for it."""

    def __init__(self, pending: Pending, pool: BufferPool, buffer: torch.Tensor) -> None:
        self._pending, self._pool, self._buffer = pending, pool, buffer

    def wait(self) -> None:
        self._pending.wait()
        self._pool.give_back(self._buffer)
