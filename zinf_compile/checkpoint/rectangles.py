"""Flat ranges of a tensor as rectangles: a shard is a flat range, while files hold rectangles of the whole tensor.

A range of a tensor of n dimensions is at most 2n - 1 rectangles. Called by the writers of checkpoints; knows no tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of a tensor that is contiguous in row-major order: begin and length by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.sizes)


def cut_rectangles(shape: Sequence[int], start: int, end: int) -> list[Rectangle]:
    """Return the rectangles that hold the elements [start, end) of a tensor, in row-major order; none is empty.

    Whole rows are one rectangle, what is left of the rows before and after them is cut in the same way. Raises `ValueError`
    where the tensor has no such range.
    """
    total = math.prod(shape)
    if not 0 <= start <= end <= total:
        raise ValueError(f"[{start}, {end}) of a tensor of {total} elements, {list(shape)}")
    return list(_cut(tuple(shape), start, end)) if start < end else []


def _cut(shape: tuple[int, ...], start: int, end: int) -> Iterator[Rectangle]:
    if not shape:
        yield Rectangle((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the whole rows
    if last < first:  # within one row
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Rectangle((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], number: int, start: int, end: int) -> Iterator[Rectangle]:
    if start < end:
        begin = number * math.prod(shape[1:])
        for part in _cut(shape[1:], start - begin, end - begin):
            yield Rectangle((number, *part.offsets), (1, *part.sizes))
