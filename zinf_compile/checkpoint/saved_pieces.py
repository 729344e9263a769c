"""The pieces that a save has still to write when it returns: its thread writes them, or who is about to change one.

See Note: Pieces that are about to change. Called by `background` and, through `ShardsSave`, by units and by the chunks of
optimizers; knows neither files nor ranks.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zinf_compile.ir.chunk_columns import VALUE
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import BLOCK_BYTES
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.units.backing import NvmeBacking
from zinf_compile.runtime.units.shard_values import pieces_of
from zinf_compile.runtime.units.unit import Unit

_AHEAD = 4
"""Pieces that the thread reads while it writes one; each has `BLOCK_BYTES` at most."""

_POLL_S = 0.0005

Put = Callable[[str, int, torch.Tensor], None]
"""Keeps elements of a tensor, given by its key and the number of the first one in this rank's shard."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Elements of a piece that belong to one tensor."""

    key: str
    start: int
    """Number of the first one in this rank's shard of the tensor."""
    offset: int
    """Number of the first one in the piece."""
    numel: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SavedPiece:
    """Elements [start, end) of a column of an owner, which is a unit or a chunk of states."""

    owner: Hashable
    column: str
    start: int
    end: int
    dtype: torch.dtype
    places: Sequence[Place]
    in_memory: Callable[[], torch.Tensor] | None = None
    """Returns the elements, flat, where they are in memory."""
    read: Callable[[torch.Tensor], Pending] | None = None
    """Starts to read them from a drive."""


class SavedPieces:
    """Pieces by owner; those of an owner are written in their order, owners in theirs.

    One thread calls `write_rest`, any may call the rest meanwhile. `put` copies what it is given; any of these threads calls it.
    """

    def __init__(self, pieces: Iterable[SavedPiece], put: Put) -> None:
        self._put = put
        self._lock = threading.RLock()  # entered directly: Ctrl-C may leave a condition locked
        self._left: dict[Hashable, list[SavedPiece]] = {}
        for piece in pieces:
            self._left.setdefault(piece.owner, []).append(piece)
        self._busy: dict[SavedPiece, int] = {}
        """Pieces that a thread is writing, and which one."""
        self._expected: dict[Hashable, frozenset[Hashable]] = {}
        self._hurried = self._stopped = False
        self._error: BaseException | None = None

    def before_change(
        self, owner: Hashable, start: int, end: int, columns: Mapping[str, torch.Tensor] | None = None, first: int = 0
    ) -> None:
        """See `ShardsSave.before_change`. An error ends the save: `write_rest` raises it."""
        self._reclaim()
        while not self._stopped and (owner in self._left or self._is_busy(owner)):
            with self._lock:
                piece, busy = self._take(lambda: self._of(owner, start, end)), self._is_busy(owner)
            if piece is not None:
                try:
                    self._keep(piece, _given(piece, columns, first))
                except Exception as error:
                    self._error = self._error or error
                    self.stop()
            elif busy:
                time.sleep(_POLL_S)
            else:
                return

    def expect(self, caller: Hashable, owners: Iterable[Hashable]) -> None:
        """See `ShardsSave.expect`."""
        expected = frozenset(owners)
        with self._lock:
            self._expected.pop(caller, None)
            if expected:
                self._expected[caller] = expected

    def hurry(self) -> None:
        """Let the thread write all that is left, also what others were expected to: somebody waits for it."""
        self._reclaim()
        self._hurried = True

    def stop(self) -> None:
        """Let go of all pieces: the save has failed, or is over."""
        with self._lock:
            self._stopped = True
            self._left, self._busy = {}, {}

    def write_rest(self) -> None:
        """Return when all pieces are written, by whomever. Raises the first error."""
        buffers = collections.deque(aligned_buffer(BLOCK_BYTES) for _ in range(_AHEAD))
        ahead: collections.deque[tuple[SavedPiece, torch.Tensor, Pending]] = collections.deque()
        try:
            while not self._stopped and (self._left or self._busy):
                while len(ahead) < _AHEAD and (piece := self._take(self._next)) is not None:
                    ahead.append((piece, *_begin(piece, buffers[0])))
                    buffers.rotate(-1)
                if not ahead:
                    time.sleep(_POLL_S)  # others write the rest
                    continue
                piece, values, arriving = ahead[0]
                arriving.wait()
                self._keep(piece, values)
                ahead.popleft()
        finally:
            self.stop()
            for _, _, arriving in ahead:
                with contextlib.suppress(Exception):
                    arriving.wait()
        if self._error is not None:
            raise self._error

    def _keep(self, piece: SavedPiece, values: torch.Tensor) -> None:
        with torch.no_grad():
            for place in piece.places:
                self._put(place.key, place.start, values[place.offset : place.offset + place.numel])
        with self._lock:
            self._busy.pop(piece, None)

    def _take(self, find: Callable[[], SavedPiece | None]) -> SavedPiece | None:
        """Return the piece that `find` returns, for this thread to write."""
        with self._lock:
            piece = find()
            if piece is not None:
                self._busy[piece] = threading.get_ident()
                self._left[piece.owner].remove(piece)
                if not self._left[piece.owner]:
                    del self._left[piece.owner]
            return piece

    def _reclaim(self) -> None:
        """Let others write what this thread has taken before it was interrupted."""
        with self._lock:
            for piece in [piece for piece, thread in self._busy.items() if thread == threading.get_ident()]:
                if piece not in self._left.setdefault(piece.owner, []):
                    self._left[piece.owner].insert(0, piece)
                del self._busy[piece]

    def _is_busy(self, owner: Hashable) -> bool:
        with self._lock:
            return any(piece.owner == owner for piece in self._busy)

    def _of(self, owner: Hashable, start: int, end: int) -> SavedPiece | None:
        return next((piece for piece in self._left.get(owner, ()) if piece.start < end and start < piece.end), None)

    def _next(self) -> SavedPiece | None:
        expected = frozenset[Hashable]() if self._hurried else frozenset[Hashable]().union(*self._expected.values())
        return next((pieces[0] for owner, pieces in self._left.items() if owner not in expected), None)


def _given(piece: SavedPiece, columns: Mapping[str, torch.Tensor] | None, first: int) -> torch.Tensor:
    """Return a piece's elements: of the memory that was given, where that has them."""
    column = (columns or {}).get(piece.column)
    if column is not None and first <= piece.start and piece.end <= first + column.numel():
        return column[piece.start - first : piece.end - first]
    values, arriving = _begin(piece, None)
    arriving.wait()
    return values


def _begin(piece: SavedPiece, buffer: torch.Tensor | None) -> tuple[torch.Tensor, Pending]:
    """Start to bring a piece's elements to host memory; return where they will be."""
    if piece.in_memory is not None:
        return piece.in_memory(), Done()
    size = format_of(piece.dtype).bytes(piece.end - piece.start)
    values = (aligned_buffer(size) if buffer is None else buffer[:size]).view(piece.dtype)
    assert piece.read is not None, "it is in memory or on a drive"
    return values, piece.read(values)


def unit_pieces(unit: Unit, key: str) -> list[SavedPiece]:
    """Return the pieces of a parameter's shard, wherever it lives."""
    if isinstance(unit.backing, NvmeBacking):
        blocks = unit.backing.blocks(0, unit.shard_numel)
        reads = [unit.backing.block(start).read for start, _ in blocks]
        return [_shard_piece(unit, key, span, read=read) for span, read in zip(blocks, reads, strict=True)]
    numel = format_of(unit.dtype).numel_within(BLOCK_BYTES)
    return [
        _shard_piece(unit, key, span, in_memory=partial(_now, unit, *span))
        for start, end in pieces_of(unit)
        for span in [(begin, min(begin + numel, end)) for begin in range(start, end, numel)]
    ]


def memory_pieces(owner: Hashable, key: str, column: str, flat: torch.Tensor) -> list[SavedPiece]:
    """Return the pieces of a tensor in memory, whose memory stays what it is, and which changes after `before_change` alone."""
    step = format_of(flat.dtype).numel_within(BLOCK_BYTES)
    return [
        SavedPiece(owner, column, start, end, flat.dtype, [Place(key, start, 0, end - start)], partial(_part, flat, start, end))
        for start in range(0, flat.numel(), step)
        for end in [min(start + step, flat.numel())]
    ]


def _part(flat: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return flat[start:end].cpu()


def _now(unit: Unit, start: int, end: int) -> torch.Tensor:
    shard = unit.shard if unit.backing is None else unit.resident
    assert shard is not None, "it is in memory"
    return shard[start:end].cpu()


def _shard_piece(unit: Unit, key: str, span: tuple[int, int], **where: Any) -> SavedPiece:
    start, end = span
    return SavedPiece(unit, VALUE, start, end, unit.dtype, [Place(key, start, 0, end - start)], **where)
