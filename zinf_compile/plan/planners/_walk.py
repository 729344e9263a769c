"""Walks through steps boundary by boundary and starts each transfer as early as memory allows: the schedule for given decisions.

The planner decides what stays in memory between two uses; this finds when everything else moves. It knows nothing of units and
states: a `Gap` is the time between two uses of anything, in which it either stays, or leaves and comes back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PERIODS = 3
"""Steps that are walked: the first begins with nothing on its way."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something is used in region `last` and again in region `next`, of the same step or (R or more) the following one."""

    key: str
    last: int
    next: int
    kept: tuple[int, ...]
    """Bytes in each memory while it stays."""
    moving: tuple[int, ...]
    """Bytes in each memory while it comes back, from its start to its due."""
    path: tuple[tuple[int, float], ...]
    """(lane, seconds) of each hop on the way back, in order."""
    leaves: tuple[tuple[int, float], ...] = ()
    """(lane, seconds) of each hop on the way out; none: it is dropped."""
    leaving: tuple[int, ...] = ()
    """Bytes in each memory until it has left; none: as `kept`."""
    beyond: tuple[int, ...] = ()
    """Bytes in each memory from the moment it begins to leave until it is back."""
    earliest: int = -(1 << 30)
    """The first boundary at which it can start to come back."""
    may_stay: bool = True

    @property
    def seconds(self) -> float:
        """Return the time on lanes that is saved where it stays."""
        return sum(each for _, each in (*self.path, *self.leaves))


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What passes lanes in each step whatever is decided, such as a gradient on its way home."""

    start: int
    """The boundary at which it is issued, before anything that comes back."""
    path: tuple[tuple[int, float, int], ...]
    """(lane, seconds, due) of each hop, in order; compute waits at boundary `due`, up to R."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """What was decided for one gap that does not stay; boundaries of the step of its use `last`."""

    gap: Gap
    gone: int
    """The boundary at which it has left."""
    start: int


@dataclasses.dataclass(frozen=True, slots=True)
class Walked:
    """A schedule for a step that repeats."""

    seconds: float
    moves: tuple[Move, ...]


class Walk:
    """The part of a problem that all decisions have in common."""

    def __init__(
        self,
        seconds: Sequence[float],
        rooms: Sequence[float],
        base: Sequence[npt.NDArray[np.int64]],
        lanes: int,
        loads: Sequence[Load] = (),
        *,
        waits: bool = True,
    ) -> None:
        """`seconds` of regions. For each memory its room, and the bytes taken without any gap at each region, and last during
        the step. `waits`: a region for which there is no room waits until something has left.
        """
        self.loads = loads
        self.waits = waits
        self.seconds = list(seconds)
        self.count = len(self.seconds)
        self.lanes = lanes
        self.rooms = [int(min(room, 2**62)) for room in rooms]
        self.base = [np.asarray(each, dtype=np.int64) for each in base]
        self.free = [room - each for room, each in zip(self.rooms, self.base, strict=True)]

    def leave_out(self, sizes: Sequence[int]) -> bool:
        """Use so many bytes less of each memory; return whether what is there without any gap still fits."""
        self.rooms = [room - size for room, size in zip(self.rooms, sizes, strict=True)]
        self.free = [free - size for free, size in zip(self.free, sizes, strict=True)]
        return not any((free < 0).any() for free in self.free)

    def room(self, kept: Sequence[Gap]) -> list[npt.NDArray[np.int64]] | None:
        """Return the bytes that are left at each moment with these gaps kept; None where they do not fit."""
        found = [each.copy() for each in self.free]
        for gap in kept:
            for memory, size in enumerate(gap.kept):
                if size:
                    self.take(found[memory], size, gap.last + 1, gap.next)
        return None if any((each < 0).any() for each in found) else found

    def take(self, moments: npt.NDArray[np.int64], size: int, start: int, end: int) -> None:
        """Take bytes from boundary `start` to boundary `end` of a step that repeats."""
        period = self.count + 1
        first, last = start + start // self.count, end - 1 + (end - 1) // self.count
        if last < first:
            return
        whole, rest = divmod(last - first + 1, period)
        if whole:
            moments -= whole * size
        begin = first % period
        moments[begin : begin + rest] -= size
        if begin + rest > period:
            moments[: begin + rest - period] -= size

    def run(self, gaps: Sequence[Gap], kept: frozenset[int]) -> Walked | None:
        """Return the schedule with the gaps of these numbers kept; None where it does not fit into memory."""
        room = self.room([gap for number, gap in enumerate(gaps) if number in kept])
        if room is None:
            return None
        moved = [gap for number, gap in enumerate(gaps) if number not in kept]
        return _Run(self, room, moved).result()


class _Run:
    def __init__(self, walk: Walk, room: list[npt.NDArray[np.int64]], gaps: list[Gap]) -> None:
        self.walk, self.gaps = walk, gaps
        count = walk.count
        # Moments of all periods in a row; the last gaps reach into one more.
        self.left = [np.tile(each, PERIODS + 2) for each in room]
        self.lane_free = [0.0] * walk.lanes
        self.out = sorted((gap.last + 1, number) for number, gap in enumerate(gaps) if gap.leaves)
        order = sorted(range(len(gaps)), key=lambda number: (gaps[number].next, gaps[number].last))
        self.queue = [
            (gaps[n].next + k * count, k, n) for k in range(-1, PERIODS) for n in order if gaps[n].next + k * count >= 0
        ]
        self.queue.sort()
        self.starts: dict[tuple[int, int], int] = {}
        self.gone: dict[tuple[int, int], int] = {}
        self.leaving: dict[tuple[int, int], float] = {}
        self.arrivals: dict[int, float] = {}
        self.frees: dict[int, float] = {}

    def result(self) -> Walked | None:
        walk, count = self.walk, self.walk.count
        now, begins = 0.0, []
        leaving_at: dict[int, list[tuple[int, int]]] = {}
        for boundary, number in self.out:
            for period in range(PERIODS):
                leaving_at.setdefault(boundary + period * count, []).append((period, number))
        head = 0
        loads: dict[int, list[Load]] = {}
        for load in walk.loads:
            loads.setdefault(load.start % count, []).append(load)
        for boundary in range(PERIODS * count + 1):
            now = max(now, self.frees.pop(boundary, now))
            if boundary >= count or boundary % count:  # the step before the first one has left nothing
                for load in loads.get(boundary % count, ()):
                    self._pass(load, boundary, now)
                now = max(now, self.frees.pop(boundary, now))  # due where it starts: behind the last region
            for key in [key for key, end in self.leaving.items() if end <= now]:
                self._has_left(key, boundary)
            if boundary % count == 0:
                begins.append(now)
            for key in leaving_at.get(boundary, ()):
                self._leave(key, boundary, now)
            while self._is_awaited(boundary):
                now = self._wait_for_first(boundary, now)
            while head < len(self.queue):
                due, period, number = self.queue[head]
                gap = self.gaps[number]
                if boundary < max(gap.earliest, gap.last + 1) + period * count:
                    break
                while not (fits := self._fits(gap.moving, boundary, due)) and due <= boundary and self.leaving:
                    now = self._wait_for_first(boundary, now)
                if not fits:
                    if due <= boundary:
                        return None
                    break
                key = (period, number)
                if key in self.leaving:
                    if due > boundary:
                        break
                    now = max(now, self.leaving[key])
                    self._has_left(key, boundary)
                head += 1
                self._come(key, boundary, due, now)
            if head < len(self.queue) and self.queue[head][0] <= boundary < PERIODS * count:
                return None
            if boundary < PERIODS * count:
                now = max(now, self.arrivals.pop(boundary, now)) + walk.seconds[boundary % count]
        return self._steady(begins)

    def _steady(self, begins: list[float]) -> Walked | None:
        """Return the moves of the last period but for those of which the walk did not see the end."""
        count, moves = self.walk.count, []
        for number, gap in enumerate(self.gaps):
            period = PERIODS - 1 - (1 if gap.next >= count else 0)
            start = self.starts.get((period, number))
            if start is None:
                return None
            gone = self.gone.get((period, number), gap.last + 1 + period * count)
            moves.append(Move(gap, gone - period * count, start - period * count))
        return Walked(begins[-1] - begins[-2], tuple(moves))

    def _moment(self, boundary: int) -> int:
        return boundary + boundary // self.walk.count

    def _fits(self, sizes: tuple[int, ...], start: int, end: int) -> bool:
        if end <= start:
            return True
        first, last = self._moment(start), self._moment(end - 1) + 1
        return all(not size or int(self.left[memory][first:last].min()) >= size for memory, size in enumerate(sizes))

    def _is_awaited(self, boundary: int) -> bool:
        """Say whether the region behind a boundary waits for memory of what is still leaving."""
        if not (self.walk.waits and self.leaving):
            return False
        lacking = [memory for memory, left in enumerate(self.left) if left[self._moment(boundary)] < 0]
        gaps = [self.gaps[number] for _, number in self.leaving]
        return any((gap.leaving or gap.kept)[memory] for memory in lacking for gap in gaps)

    def _wait_for_first(self, boundary: int, now: float) -> float:
        """Let compute wait until the first of what is leaving has left; return when that is."""
        first = min(self.leaving, key=lambda key: self.leaving[key])
        now = max(now, self.leaving[first])
        self._has_left(first, boundary)
        return now

    def _change(self, sizes: tuple[int, ...], start: int, end: int, sign: int) -> None:
        if end > start:
            first, last = self._moment(start), self._moment(end - 1) + 1
            for memory, size in enumerate(sizes):
                if size:
                    self.left[memory][first:last] -= sign * size

    def _pass(self, load: Load, boundary: int, now: float) -> None:
        """Issue what passes lanes in each step."""
        for lane, seconds, due in load.path:
            now = self.lane_free[lane] = max(self.lane_free[lane], now) + seconds
            at = boundary - load.start + due
            self.frees[at] = max(self.frees.get(at, 0.0), now)

    def _leave(self, key: tuple[int, int], boundary: int, now: float) -> None:
        """Begin to move out; the memory is taken until it has left, at the latest until the next use."""
        gap = self.gaps[key[1]]
        for lane, seconds in gap.leaves:
            now = self.lane_free[lane] = max(self.lane_free[lane], now) + seconds
        self.leaving[key] = now
        end = gap.next + key[0] * self.walk.count
        self._change(gap.leaving or gap.kept, boundary, end, 1)
        if gap.beyond:
            self._change(gap.beyond, boundary, end, 1)

    def _has_left(self, key: tuple[int, int], boundary: int) -> None:
        gap = self.gaps[key[1]]
        del self.leaving[key]
        self.gone[key] = boundary
        self._change(gap.leaving or gap.kept, boundary, gap.next + key[0] * self.walk.count, -1)

    def _come(self, key: tuple[int, int], boundary: int, due: int, now: float) -> None:
        gap = self.gaps[key[1]]
        for lane, seconds in gap.path:
            now = self.lane_free[lane] = max(self.lane_free[lane], now) + seconds
        self.arrivals[due] = max(self.arrivals.get(due, 0.0), now)
        self.starts[key] = boundary
        self._change(gap.moving, boundary, due, 1)
