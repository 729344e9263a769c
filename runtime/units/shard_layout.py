"""The layout of a unit in memory, and its cut into spans of which each rank has a part."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from zinf_compile.ir.formats import StateFormat, format_of
from zinf_compile.runtime.comm.shard_ranges import shard_numel, shard_range


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSpan:
    """A span [start, end) of a flat unit that is divided over the ranks by itself: a tile, or all of it."""

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


def cut_spans(numel: int, borders: Sequence[int], world_size: int) -> tuple[ShardSpan, ...]:
    """Return the spans of a unit between inner `borders`, each a multiple of `world_size`: only the last one is padded."""
    assert not any(border % world_size for border in borders), "padding within a shard has no place"
    ends = itertools.pairwise([0, *borders, numel])
    return tuple(ShardSpan(start, end, start // world_size, world_size) for start, end in ends)


class DenseLayout:
    """Shape and strides of what is gathered: a parameter, or a tile of one."""

    def __init__(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = tuple(shape)
        self.stride = tuple(stride)
        self.dtype = dtype
        self.device = device
        self.numel = math.prod(self.shape)

    @property
    def format(self) -> StateFormat:
        """The format of its values."""
        return format_of(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of it whole."""
        return self.format.bytes(self.numel)

    def logical(self, flat: torch.Tensor) -> torch.Tensor:
        """View a flat full tensor in the parameter's shape and strides."""
        return flat.as_strided(self.shape, self.stride)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """Lay a full tensor of the parameter's shape out flat in the parameter's order; copies only when it must."""
        if value.stride() != self.stride:
            value = torch.empty_strided(self.shape, self.stride, dtype=value.dtype, device=value.device).copy_(value)
        return value if self.stride == (1,) else value.as_strided((self.numel,), (1,))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Say whether the elements fill a contiguous range of memory, in whatever order of dimensions."""
    expected = 1
    for size, step in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda pair: pair[1]):
        if size == 0:
            return True
        if step != expected:
            return False
        expected *= size
    return True
