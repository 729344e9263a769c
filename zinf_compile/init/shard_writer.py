"""Shards that go to a drive piece by piece, each made while those before it are written."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.memory.inflight import InflightQueue
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.transfer.move import move, on_host, route_of
from zinf_compile.runtime.units.shard_values import pieces_of as shard_pieces
from zinf_compile.runtime.units.unit import Unit

BYTES_ON_THE_WAY = 64 << 20
"""The most bytes of pieces being made or written; one piece at least, however large."""


class Piece(NamedTuple):
    """A range [first, last) of a shard: its first `valid` elements are those of the flat parameter from `start` on."""

    first: int
    last: int
    start: int
    valid: int


def pieces_of(unit: Unit) -> list[Piece]:
    """Return the pieces in which a unit's shard lies on a drive."""
    places = [span.place for span in unit.spans]
    found = []
    for first, last in shard_pieces(unit):
        span = bisect.bisect(places, first) - 1
        start, end = unit.held[span]
        start += first - places[span]
        found.append(Piece(first, last, start, max(0, min(last - first, end - start))))
    return found


class PieceWriter:
    """Makes pieces, by threads of its own where it has some, and writes them; their buffers count as staging."""

    def __init__(self, ledger: Ledger, *, most_bytes: int = BYTES_ON_THE_WAY, threads: int = 0) -> None:
        self._pool = BufferPool(most_bytes, account=lambda change: ledger.add("staging", change))
        self._threads = ThreadPoolExecutor(threads) if threads else None
        self._writing = InflightQueue(most_bytes)

    def write(self, unit: Unit, piece: Piece, make: Callable[[torch.Tensor], object]) -> None:
        """Let `make` fill a flat tensor with the piece's valid elements, and write it to the unit's drive."""
        size = unit.format.bytes(piece.last - piece.first)
        self._writing.make_room(size)
        room = self._pool.take(size)
        assert room is not None, "no more is out than the pool may have"

        def begin() -> Pending:
            source = room[:size].view(unit.dtype)
            make(source[: piece.valid])
            source[piece.valid :].zero_()
            assert unit.backing is not None, "on a drive"
            return move(on_host(source), unit.backing.location(piece.first, piece.last), by=route_of(unit.context))

        if self._threads is not None:
            begun: Future[Pending] = self._threads.submit(begin)
        else:
            begun = Future()
            begun.set_result(begin())
        self._writing.add(_Write(begun, self._pool, room), room.nbytes)

    def drain(self) -> None:
        """Return when all is written; raise the first error, after all has ended."""
        self._writing.drain()

    def close(self) -> None:
        """Drain, and release threads and memory."""
        try:
            self.drain()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release threads and memory without waiting: writes under way end by themselves."""
        self._writing.abandon()
        self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


class _Write:
    """One piece being made, and then written; its buffer is returned to the pool after a wait for it."""

    def __init__(self, begun: Future[Pending], pool: BufferPool, buffer: torch.Tensor) -> None:
        self._begun, self._pool, self._buffer = begun, pool, buffer

    def wait(self) -> None:
        self._begun.result().wait()
        self._pool.give_back(self._buffer)
