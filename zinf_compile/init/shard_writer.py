"""Shards that go to a drive piece by piece, each made while those before it are written."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from zinf_compile.runtime.lanes.lanes import Pending, wait_for_all
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.transfer.move import move, on_host, route_of
from zinf_compile.runtime.units.shard_values import pieces_of as shard_pieces
from zinf_compile.runtime.units.unit import Unit

BYTES_ON_THE_WAY = 64 << 20
"""Made or written while the next piece is begun; one piece at least, however large."""


class Piece(NamedTuple):
    """A stretch [first, last) of a shard: its first `valid` elements are those of the flat parameter from `start` on."""

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
    """Has pieces made, by threads of its own where it has some, and written; counts what they take as staged."""

    def __init__(self, ledger: Ledger, *, most_bytes: int = BYTES_ON_THE_WAY, threads: int = 0) -> None:
        self._pool = BufferPool(most_bytes, account=lambda change: ledger.add("staging", change))
        self._most_bytes = most_bytes
        self._bytes = 0
        self._threads = ThreadPoolExecutor(threads) if threads else None
        self._under_way: collections.deque[tuple[Callable[[], Pending], torch.Tensor]] = collections.deque()

    def write(self, unit: Unit, piece: Piece, make: Callable[[torch.Tensor], object]) -> None:
        """Let `make` fill a flat tensor with the piece's valid elements, and write it to the unit's drive."""
        size = unit.format.bytes(piece.last - piece.first)
        while self._under_way and self._bytes + size > self._most_bytes:
            self._wait_for_oldest()
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
            self._under_way.append((begun.result, room))
        else:
            writing = begin()
            self._under_way.append((lambda: writing, room))
        self._bytes += room.nbytes

    def drain(self) -> None:
        """Return when all is written; raise the first error, after all has ended."""
        under_way, self._under_way = self._under_way, collections.deque()
        self._bytes = 0
        wait_for_all(lambda begun=begun: begun().wait() for begun, _ in under_way)  # type: ignore[misc]
        for _, room in under_way:
            self._pool.give_back(room)

    def close(self) -> None:
        """The same, and let go of threads and memory."""
        try:
            self.drain()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Wait for nothing: what is under way ends by itself."""
        self._under_way.clear()
        self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _wait_for_oldest(self) -> None:
        begun, room = self._under_way.popleft()
        self._bytes -= room.nbytes
        begun().wait()
        self._pool.give_back(room)
