"""The pieces that a save has still to write when it returns: its thread writes them, or who is about to change one.

See Note: Pieces that are about to change, and Note: Pieces that a deferred step has still to update. Called by `background` and,
through `ShardsSave`, by units and by the chunks of optimizers; knows neither files nor ranks.
"""

from __future__ import annotations

import bisect
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
    Without `has_room`, whoever is about to change a piece waits for `room_made`, before which nothing is put.
    """

    def __init__(self, pieces: Iterable[SavedPiece], put: Put, *, has_room: bool = True) -> None:
        self._put, self._has_room = put, has_room
        self._lock = threading.RLock()  # entered directly: Ctrl-C may leave a condition locked
        self._left: dict[Hashable, list[SavedPiece]] = {}
        for piece in pieces:
            self._left.setdefault(piece.owner, []).append(piece)
        self._busy: dict[SavedPiece, int] = {}
        """Pieces that a thread is writing, and which one."""
        self._expected: dict[Hashable, frozenset[Hashable]] = {}
        self._to_come: dict[Hashable, list[SavedPiece]] = {}
        """Pieces that a deferred step has still to update."""
        self._steps: set[Hashable] = set()
        """Deferred steps that are not over."""
        self._hurried = self._stopped = False
        self._error: BaseException | None = None

    def before_change(
        self, owner: Hashable, start: int, end: int, columns: Mapping[str, torch.Tensor] | None = None, first: int = 0
    ) -> None:
        """See `ShardsSave.before_change`. An error ends the save: `write_rest` raises it."""
        self._reclaim()
        self._wait_for_room(self._left, owner, start, end)
        while not self._stopped and (owner in self._left or self._is_busy(owner, start, end)):
            with self._lock:
                piece = self._take(self._left, lambda: _of(self._left, owner, start, end))
                busy = self._is_busy(owner, start, end)
            if piece is not None:
                self._keep_or_fail(piece, partial(_given, piece, columns, first))
            elif busy:
                time.sleep(_POLL_S)
            else:
                return

    def await_updates(self, step: Hashable, due: Iterable[tuple[Hashable, int, int]]) -> None:
        """Leave to a deferred step, until `end_step`, what it has still to update: elements [start, end) of owners.

        None of what was cut into pieces is in part in these.
        """
        starts: dict[Hashable, list[int]] = {}
        ends: dict[tuple[Hashable, int], int] = {}
        for owner, start, end in due:
            starts.setdefault(owner, []).append(start)
            ends[owner, start] = end
        with self._lock:
            self._steps.add(step)
            for owner, begins in starts.items():
                begins.sort()
                left, coming = list[SavedPiece](), list[SavedPiece]()
                for piece in self._left.get(owner, ()):
                    before = bisect.bisect_right(begins, piece.start)
                    is_due = before > 0 and piece.start < ends[owner, begins[before - 1]]
                    (coming if is_due else left).append(piece)
                if coming:
                    self._to_come[owner] = coming
                    self._left[owner] = left  # in its place among the others
                if not left:
                    self._left.pop(owner, None)

    def updated(self, owner: Hashable, start: int, end: int, columns: Mapping[str, torch.Tensor], first: int = 0) -> None:
        """See `ShardsSave.updated`. An error ends the save: `write_rest` raises it."""
        self._wait_for_room(self._to_come, owner, start, end)
        while (piece := self._take(self._to_come, lambda: _of(self._to_come, owner, start, end))) is not None:
            self._keep_or_fail(piece, partial(_part_given, piece, columns, first))

    def end_step(self, step: Hashable, pieces: Iterable[SavedPiece]) -> None:
        """Note that a deferred step is over; `pieces`: what is known only now."""
        with self._lock:
            if self._stopped:
                return
            assert not self._to_come or self._steps - {step}, "it has updated all that it was to"
            for piece in pieces:
                self._left.setdefault(piece.owner, []).append(piece)
            self._steps.discard(step)

    def fail(self, error: BaseException) -> None:
        """End the save with an error, unless it has one."""
        self._error = self._error or error
        self.stop()

    def expect(self, caller: Hashable, owners: Iterable[Hashable]) -> None:
        """See `ShardsSave.expect`."""
        expected = frozenset(owners)
        with self._lock:
            self._expected.pop(caller, None)
            if expected:
                self._expected[caller] = expected

    def room_made(self) -> None:
        """Let pieces be put: there is space for all of them."""
        self._has_room = True

    def hurry(self) -> None:
        """Let the thread write all that is left, also what others were expected to: somebody waits for it."""
        self._reclaim()
        self._hurried = True

    def stop(self) -> None:
        """Let go of all pieces: the save has failed, or is over."""
        with self._lock:
            self._stopped = True
            for kept in (self._left, self._busy, self._to_come, self._steps):
                kept.clear()

    def write_rest(self) -> None:
        """Return when all pieces are written, by whomever. Raises the first error."""
        buffers = collections.deque(aligned_buffer(BLOCK_BYTES) for _ in range(_AHEAD))
        ahead: collections.deque[tuple[SavedPiece, torch.Tensor, Pending]] = collections.deque()
        try:
            while self._is_under_way():
                while len(ahead) < _AHEAD and (piece := self._take(self._left, self._next)) is not None:
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

    def _wait_for_room(self, among: Mapping[Hashable, Sequence[SavedPiece]], owner: Hashable, start: int, end: int) -> None:
        """Wait until pieces may be put, or need no more be, where one of those `among` has any of the elements [start, end)."""
        while not self._has_room:
            with self._lock:
                if self._stopped or _of(among, owner, start, end) is None:
                    return
            time.sleep(_POLL_S)

    def _is_under_way(self) -> bool:
        with self._lock:
            return not self._stopped and bool(self._left or self._busy or self._to_come or self._steps)

    def _keep_or_fail(self, piece: SavedPiece, values: Callable[[], torch.Tensor]) -> None:
        try:
            self._keep(piece, values())
        except Exception as error:
            self.fail(error)

    def _keep(self, piece: SavedPiece, values: torch.Tensor) -> None:
        with torch.no_grad():
            for place in piece.places:
                self._put(place.key, place.start, values[place.offset : place.offset + place.numel])
        with self._lock:
            self._busy.pop(piece, None)

    def _take(self, among: dict[Hashable, list[SavedPiece]], find: Callable[[], SavedPiece | None]) -> SavedPiece | None:
        """Return the piece that `find` returns, of those `among`, for this thread to write."""
        with self._lock:
            piece = find()
            if piece is not None:
                self._busy[piece] = threading.get_ident()
                among[piece.owner].remove(piece)
                if not among[piece.owner]:
                    del among[piece.owner]
            return piece

    def _reclaim(self) -> None:
        """Let others write what this thread has taken before it was interrupted."""
        with self._lock:
            for piece in [piece for piece, thread in self._busy.items() if thread == threading.get_ident()]:
                if piece not in self._left.setdefault(piece.owner, []):
                    self._left[piece.owner].insert(0, piece)
                del self._busy[piece]

    def _is_busy(self, owner: Hashable, start: int, end: int) -> bool:
        with self._lock:
            return any(piece.owner == owner and piece.start < end and start < piece.end for piece in self._busy)

    def _next(self) -> SavedPiece | None:
        expected = frozenset[Hashable]() if self._hurried else frozenset[Hashable]().union(*self._expected.values())
        return next((pieces[0] for owner, pieces in self._left.items() if owner not in expected), None)


def _of(among: Mapping[Hashable, Sequence[SavedPiece]], owner: Hashable, start: int, end: int) -> SavedPiece | None:
    return next((piece for piece in among.get(owner, ()) if piece.start < end and start < piece.end), None)


def _given(piece: SavedPiece, columns: Mapping[str, torch.Tensor] | None, first: int) -> torch.Tensor:
    """Return a piece's elements: of the memory that was given, where that has them."""
    if columns is not None and piece.column in columns and _is_given(piece, columns, first):
        return _part_given(piece, columns, first)
    values, arriving = _begin(piece, None)
    arriving.wait()
    return values


def _is_given(piece: SavedPiece, columns: Mapping[str, torch.Tensor], first: int) -> bool:
    return first <= piece.start and piece.end <= first + columns[piece.column].numel()


def _part_given(piece: SavedPiece, columns: Mapping[str, torch.Tensor], first: int) -> torch.Tensor:
    assert _is_given(piece, columns, first), "what is written is cut where updates are, or finer"
    return columns[piece.column][piece.start - first : piece.end - first]


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
    unit.wait_arrived()
    shard = unit.shard if unit.backing is None else unit.resident
    assert shard is not None, "it is in memory"
    return shard[start:end].cpu()


def _shard_piece(unit: Unit, key: str, span: tuple[int, int], **where: Any) -> SavedPiece:
    start, end = span
    return SavedPiece(unit, VALUE, start, end, unit.dtype, [Place(key, start, 0, end - start)], **where)
