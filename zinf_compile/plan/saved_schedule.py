"""When saved memory leaves and comes back, stretch of compute by stretch, and the seconds of a step that this leads to.

Note: late waits
    A transfer that compute waits for one stretch later hides behind one stretch. So a wait comes as late as there is room for
    what is on its way: in the forward the oldest transfers end where room does, in the backward those begin early whose values
    are due first. The moment when a graph holds most is no fuller for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

Hop = tuple[str, float]
"""The lane of a transfer, and its seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Saved memory that leaves the device and comes back."""

    name: str
    bytes: int
    left: int
    """The stretch of the forward that uses it last."""
    due: int
    """The stretch of the backward that uses it first."""
    out: tuple[Hop, ...]
    """From the device."""
    back: tuple[Hop, ...]
    """To the device."""
    lag: int = 1
    """As that of `SavedMemory`."""
    lead: int = 1
    """As that of `SavedMemory`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stretches:
    """What a graph computes between transfers, in order."""

    seconds: Sequence[float]
    room: Sequence[int]
    """Bytes that each leaves free, with moves of lag and lead 1."""


def spread(moves: Sequence[Move], forward: Stretches, backward: Stretches) -> tuple[Move, ...]:
    """Return the moves with waits as late, and starts as early, as there is room."""
    count = len(backward.seconds)
    lags = _lags([(move.name, move.left, move.bytes) for move in moves], forward.room)
    leads = _lags([(move.name, count - 1 - move.due, move.bytes) for move in moves], backward.room[::-1])
    return tuple(dataclasses.replace(move, lag=lags[move.name], lead=leads[move.name]) for move in moves)


def _lags(moves: Sequence[tuple[str, int, int]], room: Sequence[int]) -> dict[str, int]:
    """Return for each (name, stretch behind which it starts, bytes) the stretches beside which it may be under way.

    The stretch after the start has room for it in any case. Those that started first end first where it gets short.
    """
    found: dict[str, int] = {}
    under_way: list[tuple[str, int, int]] = []
    held = 0
    started: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for move in moves:
        started[move[1]].append(move)
    for number in range(-1, len(room)):
        beside = room[number + 1] if number + 1 < len(room) else 0
        while under_way and held > beside:
            name, start, size = under_way.pop(0)
            held -= size
            found[name] = max(1, number - start)
        under_way += started[number]  # from the stretch behind the next one on it takes room
        held += sum(size for *_, size in started[number])
    return found | {name: max(1, len(room) - start) for name, start, _ in under_way}


def seconds_of(moves: Sequence[Move], forward: Sequence[float], backward: Sequence[float]) -> float:
    """Return the seconds in which a forward and its backward compute, and wait for moves."""
    lanes: dict[str, float] = defaultdict(float)
    arrived: dict[str, float] = {}
    now = _forward(moves, forward, lanes, arrived)
    return _backward(moves, backward, lanes, arrived, now)


def _forward(moves: Sequence[Move], seconds: Sequence[float], lanes: dict[str, float], arrived: dict[str, float]) -> float:
    starts: dict[int, list[tuple[Move, int]]] = defaultdict(list)
    waits: dict[int, list[Move]] = defaultdict(list)
    last = len(seconds) - 1
    for move in moves:
        for hop in range(len(move.out)):
            starts[min(last, move.left + (move.lag + hop - 1 if hop else 0))].append((move, hop))
        waits[min(last, move.left + move.lag + len(move.out) - 1)].append(move)
    now = 0.0
    for number, each in enumerate(seconds):
        now += each
        for move, hop in starts[number]:
            if hop:
                now = max(now, arrived[move.name])
            arrived[move.name] = _transfer(lanes, move.out[hop], max(now, arrived.get(move.name, 0.0)))
        for move in waits[number]:
            now = max(now, arrived[move.name])
    return now


def _backward(
    moves: Sequence[Move], seconds: Sequence[float], lanes: dict[str, float], arrived: Mapping[str, float], now: float
) -> float:
    starts: dict[int, list[tuple[Move, int]]] = defaultdict(list)
    waits: dict[int, list[Move]] = defaultdict(list)
    for move in sorted(moves, key=lambda move: move.due):
        for hop, left in enumerate(range(len(move.back), 0, -1)):
            starts[max(0, move.due - left - move.lead + 1)].append((move, hop))
        waits[move.due].append(move)
    there: dict[str, float] = dict(arrived)
    for number, each in itertools.chain(enumerate(seconds), [(len(seconds), 0.0)]):
        for move, hop in starts[number]:
            there[move.name] = _transfer(lanes, move.back[hop], max(now, there[move.name]))
        for move in waits[number]:
            now = max(now, there[move.name])
        now += each
    return now


def _transfer(lanes: dict[str, float], hop: Hop, ready: float) -> float:
    """Begin a transfer once what it moves is ready and its lane is free; return when it is over."""
    lane, seconds = hop
    lanes[lane] = max(lanes[lane], ready) + seconds
    return lanes[lane]


__all__ = ["Hop", "Move", "Stretches", "seconds_of", "spread"]
