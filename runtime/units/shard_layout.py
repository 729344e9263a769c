"""How a unit is laid out over ranks: stretches, of which each rank has a part, one after the other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from zinf_compile.runtime.comm.shard_ranges import shard_numel, shard_range


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch [start, end) of a flat unit that is divided over the ranks by itself: a tile, or all of it."""

    start: int
    end: int
    place: int
    """Where a rank's part of it begins in the rank's shard."""
    ranks: int

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's part, padding included."""
        return shard_numel(self.end - self.start, self.ranks)

    def part_of(self, rank: int) -> tuple[int, int]:
        """Return the [start, end) of the flat unit that a rank holds."""
        first, last = shard_range(self.end - self.start, self.ranks, rank)
        return self.start + first, self.start + last


def cut_stretches(numel: int, borders: Sequence[int], world_size: int) -> tuple[Stretch, ...]:
    """Return the stretches of a unit between inner `borders`, each a multiple of `world_size`: only the last one is padded."""
    assert not any(border % world_size for border in borders), "padding within a shard has no place"
    ends = itertools.pairwise([0, *borders, numel])
    return tuple(Stretch(start, end, start // world_size, world_size) for start, end in ends)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Say whether the elements fill a contiguous stretch of memory, in whatever order of dimensions."""
    expected = 1
    for size, step in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda pair: pair[1]):
        if size == 0:
            return True
        if step != expected:
            return False
        expected *= size
    return True
