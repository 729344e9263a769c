"""The rectangles of a whole tensor that one rank's shard of it holds, and where in the shard each of them lies.

Files hold rectangles in row-major order; a shard holds elements in the order of the parameter's memory. Where these differ (a
weight in channels-last) rectangles are small enough to be rearranged in memory. Called by `save`; moves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from zinf_compile.runtime.units.shard_layout import ShardSpan

from .rectangles import Rectangle, cut_rectangles

_REARRANGED_NUMEL = 1 << 20
"""The most elements of a rectangle that is rearranged."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardPart:
    """One rectangle."""

    rectangle: Rectangle
    """In the dimensions of the tensor."""
    start: int
    """Number of its first element in the shard; the others follow it."""
    order: tuple[int, ...] | None
    """Dimensions as its elements lie in the shard, the outermost first; None: row-major."""

    def rearranged(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its elements, given as they lie in the shard, in row-major order."""
        if self.order is None:
            return flat
        sizes = [self.rectangle.sizes[dim] for dim in self.order]
        inverse = sorted(range(len(self.order)), key=lambda place: self.order[place])  # type: ignore[index]
        return flat.view(sizes).permute(inverse).reshape(-1)


Stretch = tuple[int, int, int]
"""The elements [start, end) of a dense tensor, in the order of its memory, and where in a shard the first of them is."""


def shard_parts(shape: Sequence[int], stride: Sequence[int], stretches: Sequence[Stretch]) -> list[ShardPart]:
    """Return the rectangles of a shard, in its order; `stride`: of the dense tensor."""
    order = memory_order(shape, stride)
    if order is None:
        return [
            ShardPart(rectangle, place, None)
            for start, end, first in stretches
            for rectangle, place in _placed(shape, start, end, first)
        ]
    sizes = [shape[dim] for dim in order]
    return [
        ShardPart(_in_dims(rectangle, order), place, order)
        for start, end, first in stretches
        for begin in range(start, end, _REARRANGED_NUMEL)
        for rectangle, place in _placed(sizes, begin, min(begin + _REARRANGED_NUMEL, end), first + begin - start)
    ]


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions of a dense tensor as they lie in memory, the outermost first; None where that is row-major."""
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] != 1, dim))
    real = [dim for dim in order if shape[dim] > 1]
    return tuple(order) if real != sorted(real) else None


def stretches_of(spans: Sequence[ShardSpan], rank: int, numel: int) -> list[Stretch]:
    """Return what a rank has of a tensor of `numel` elements, which may be padded in its spans; neighbours are joined."""
    found: list[Stretch] = []
    for span in spans:
        start, end = (min(border, numel) for border in span.part_of(rank))
        if found and found[-1][1] == start and found[-1][2] + found[-1][1] - found[-1][0] == span.place:
            found[-1] = (found[-1][0], end, found[-1][2])
        elif start < end:
            found.append((start, end, span.place))
    return found


def _placed(sizes: Sequence[int], start: int, end: int, place: int) -> list[tuple[Rectangle, int]]:
    found = []
    for rectangle in cut_rectangles(sizes, start, end):
        found.append((rectangle, place))
        place += rectangle.numel
    return found


def _in_dims(rectangle: Rectangle, order: Sequence[int]) -> Rectangle:
    places = sorted(range(len(order)), key=lambda place: order[place])
    return Rectangle(tuple(rectangle.offsets[p] for p in places), tuple(rectangle.sizes[p] for p in places))
