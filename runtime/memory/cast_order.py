"""The order in which units that have arrived together are cast: several at a time, where that takes no more memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence


@functools.lru_cache(maxsize=4096)
def cast_order(arrived: tuple[int, ...], cast: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of units in batches, to be cast one batch behind the other, with no more memory than one by one.

    `arrived` and `cast` are the bytes of each unit before and after; what a batch was cast from is let go behind it. As few units
    as that allows, the largest ones, are cast alone and the others together, in what these have let go.
    """
    every = range(len(cast))
    most = _most([(number,) for number in every], arrived, cast)
    by_size = sorted(every, key=lambda number: -cast[number])
    for count in range(len(cast) + 1):
        batches = _batches(frozenset(by_size[:count]), most, arrived, cast)
        if _most(batches, arrived, cast) <= most:
            return tuple(batches)
    raise AssertionError("one by one they take as much as one by one")


def _batches(alone: frozenset[int], most: int, arrived: Sequence[int], cast: Sequence[int]) -> list[tuple[int, ...]]:
    """Leave all for the end but those that are cast alone, and those that have to make room for one of these."""
    batches, left, held = list[tuple[int, ...]](), list[int](), 0
    for number in range(len(cast)):
        if number not in alone:
            left.append(number)
            continue
        if held + cast[number] > most and left:
            batches.append(tuple(left))
            held -= sum(arrived[other] - cast[other] for other in left)
            left.clear()
        batches.append((number,))
        held -= arrived[number] - cast[number]
    return [*batches, tuple(left)] if left else batches


def _most(batches: Sequence[Sequence[int]], arrived: Sequence[int], cast: Sequence[int]) -> int:
    """Return the most bytes that are held at a time beyond those that have arrived."""
    held = most = 0
    for batch in batches:
        held += sum(cast[number] for number in batch)
        most = max(most, held)
        held -= sum(arrived[number] for number in batch)
    return most
