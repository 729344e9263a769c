"""Chooses which gaps are bridged by staying: the shortest, per second of transfers saved, as long as there is room.

With a known future it is best to let go of what is used furthest away; seen from the other side, memory goes to what is used
again soonest. How much room to leave for transfers on their way is tried out: `family` proposes, `Walk.run` judges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ._walk import Gap, Walk, Walked

FEW = 24
"""Gaps among which further choices are tried: where few fill the memory, their sizes decide what fits beside them."""


IMPROVED = 6
"""Rungs from one to the next for which such choices are improved step by step."""


def best_walk(
    walk: Walk, gaps: Sequence[Gap], *, rungs: int, reserves: Sequence[float], halvings: int = 0, most: int | None = None
) -> tuple[Walked, frozenset[int]] | None:
    """Return the fastest schedule of the family with what stays in it; None if not even moving everything fits.

    `most`: so many members of the family that fit are walked, those with most memory; None: all.
    """
    best: tuple[Walked, frozenset[int]] | None = None
    limit, fitting = sum(walk.seconds), 0
    if int(_with_everything(walk, gaps).max()) <= walk.rooms[0]:  # no rung of the ladder, which leave room for what moves
        kept = frozenset(number for number, gap in enumerate(gaps) if gap.may_stay)
        found = walk.run(gaps, kept)
        if found is not None:
            best = found, kept
            if found.seconds <= limit * (1 + 1e-9):
                return best
    for kept in family(walk, gaps, rungs=rungs, reserves=reserves, halvings=halvings):
        found = walk.run(gaps, kept)
        if found is None:
            continue
        if best is None or found.seconds < best[0].seconds:
            best = found, kept
            if found.seconds <= limit * (1 + 1e-9):
                break
        fitting += 1
        if fitting == most:
            break
    return best


def family(
    walk: Walk, gaps: Sequence[Gap], *, rungs: int, reserves: Sequence[float], halvings: int = 0
) -> Iterator[frozenset[int]]:
    """Yield choices of what stays on the device, each once, the one with most memory first.

    They are made for rooms on a ladder, from the least to what keeps everything; the lowest rung is halved so many times. It
    follows from the gaps alone, so that a larger budget adds choices and takes none away.
    """
    able = [number for number, gap in enumerate(gaps) if gap.may_stay]
    orders = [sorted(able, key=lambda number: _price(walk, gaps[number]))]
    if len(able) <= FEW:
        orders.append(sorted(able, key=lambda number: (-gaps[number].seconds, _price(walk, gaps[number]))))
    least, most = int(walk.base[0].max()), int(_with_everything(walk, gaps).max())
    largest = max((gap.moving[0] for gap in gaps), default=0)
    seen: set[frozenset[int]] = set()
    ladder = [(most - least) * rung // rungs for rung in range(rungs, 0, -1)]
    ladder += [(most - least) // (rungs << halved) for halved in range(1, halvings + 1)]
    for rung, more in enumerate([*ladder, 0]):
        room = least + more
        if room > walk.rooms[0]:
            continue
        own: set[frozenset[int]] = set()
        for order, reserve in itertools.product(orders, reserves):
            kept = fill(walk, gaps, order, np.maximum(room - walk.base[0] - int(largest * reserve), 0))
            own.add(kept)
            if kept not in seen:
                seen.add(kept)
                yield kept
        if len(able) <= FEW and (len(ladder) - rung) % IMPROVED == 0:
            kept = _improved(walk, gaps, able, room, own)
            if kept not in seen:
                seen.add(kept)
                yield kept


def _with_everything(walk: Walk, gaps: Sequence[Gap]) -> npt.NDArray[np.int64]:
    """Return the bytes on the device at each boundary where all gaps are bridged by staying."""
    bytes_ = walk.base[0].copy()
    for gap in gaps:
        walk.take(bytes_, -gap.kept[0], gap.last + 1, gap.next)
    return bytes_


def _improved(walk: Walk, gaps: Sequence[Gap], able: Sequence[int], room: int, known: Iterable[frozenset[int]]) -> frozenset[int]:
    """Return the best of the choices made for a room of the ladder, changed by one gap, or two, as long as that is faster."""
    smaller = Walk(walk.seconds, [room, *walk.rooms[1:]], walk.base, walk.lanes, walk.loads, waits=walk.waits)

    def seconds(kept: frozenset[int]) -> float:
        found = smaller.run(gaps, kept)
        return math.inf if found is None else found.seconds

    best = min(sorted(known, key=sorted), key=seconds)
    least, better = seconds(best), True
    changes = [*((one,) for one in able), *itertools.combinations(able, 2)]
    while better:
        better = False
        for change in changes:
            other = best.symmetric_difference(change)
            if (found := seconds(other)) < least * (1 - 1e-9):
                best, least, better = other, found, True
    return best


def _price(walk: Walk, gap: Gap) -> float:
    """Return the memory that a gap takes over time, for each second that it saves."""
    whole, rest = divmod(gap.next - gap.last - 1, walk.count)
    first = (gap.last + 1) % walk.count
    seconds = walk.seconds[first : first + rest] + walk.seconds[: max(0, first + rest - walk.count)]
    span = sum(seconds) + whole * sum(walk.seconds)
    return span * sum(gap.kept) / max(gap.seconds, 1e-12)


def fill(walk: Walk, gaps: Sequence[Gap], order: Sequence[int], free: npt.NDArray[np.int64]) -> frozenset[int]:
    """Return the gaps that fit, taken in order."""
    kept = set()
    for number in order:
        gap = gaps[number]
        left = free.copy()
        walk.take(left, gap.kept[0], gap.last + 1, gap.next)
        if (left >= 0).all():
            free = left
            kept.add(number)
    return frozenset(kept)
