"""Free ranges of an arena, taken from its beginning on: first fit, and neighbours join when they come back."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Generic, TypeVar

Mark = TypeVar("Mark")


class FreeRanges(Generic[Mark]):
    """What is free of [0, end). Each range has a mark, which parts of it keep; `join` makes that of two neighbours. No locks."""

    def __init__(self, end: int, mark: Mark, join: Callable[[Mark, Mark], Mark]) -> None:
        self._join = join
        self._starts: list[int] = [0] if end else []
        self._rest: list[tuple[int, Mark]] = [(end, mark)] if end else []
        """End and mark of each, in order, none next to another."""

    def take(self, length: int) -> tuple[int, Mark] | None:
        """Return the start and the mark of a range, which is taken from then on; None where none is as long."""
        for i, start in enumerate(self._starts):
            end, mark = self._rest[i]
            if end - start > length:
                self._starts[i] = start + length
                return start, mark
            if end - start == length:
                del self._starts[i], self._rest[i]
                return start, mark
        return None

    def give(self, start: int, length: int, mark: Mark) -> None:
        """Free a range that was taken."""
        end = start + length
        i = bisect.bisect(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end, later = self._rest[i]
            mark = self._join(mark, later)
            del self._starts[i], self._rest[i]
        if i and self._rest[i - 1][0] == start:
            self._rest[i - 1] = end, self._join(self._rest[i - 1][1], mark)
            return
        self._starts.insert(i, start)
        self._rest.insert(i, (end, mark))

    def marks(self) -> list[Mark]:
        """Return the marks of all free ranges."""
        return [mark for _, mark in self._rest]

    def free_bytes(self) -> int:
        """Return the length of all of them."""
        return sum(end - start for start, (end, _) in zip(self._starts, self._rest, strict=True))
