"""Reads this rank's shard of a saved tensor piece by piece, in the order of the parameter's memory.

Called by `load`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.units.shard_values import pieces_of
from zinf_compile.runtime.units.unit import Unit

from .rectangles import Rectangle, cut_rectangles
from .saved_files import SavedFiles
from .shard_parts import Stretch, memory_order, stretches_of


class ShardReader:
    """The elements of one saved tensor that a unit has on this rank; padding is zeros. `stride`: its own, if not the unit's."""

    def __init__(self, files: SavedFiles, key: str, unit: Unit, stride: Sequence[int] | None = None) -> None:
        self._files, self._key = files, key
        self._shape = files.tensors[key].shape
        self._stretches: list[Stretch] = stretches_of(unit.spans, unit.shard_group.rank, torch.Size(self._shape).numel())
        self._order = memory_order(self._shape, unit.stride if stride is None else stride)

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return the elements [start, end) of the shard, in the type in which they were saved."""
        piece = torch.zeros(end - start, dtype=self._files.tensors[self._key].dtype)
        for first, last, place in self._stretches:
            low, high = max(place, start), min(place + last - first, end)
            if low < high:
                self._read(first + low - place, piece[low - start : high - start])
        return piece

    def _read(self, start: int, into: torch.Tensor) -> None:
        """Fill a tensor with elements of the dense one from number `start` on, in the order of its memory."""
        if self._order is None:
            self._files.read(self._key, start, into)
            return
        done, sizes = 0, [self._shape[dim] for dim in self._order]
        for rectangle in cut_rectangles(sizes, start, start + into.numel()):
            places = sorted(range(len(sizes)), key=self._order.__getitem__)
            logical = Rectangle(tuple(rectangle.offsets[p] for p in places), tuple(rectangle.sizes[p] for p in places))
            values = self._files.read_rectangle(self._key, logical).permute(self._order)
            into[done : done + rectangle.numel] = values.reshape(-1)
            done += rectangle.numel


def fill_shard(reader: ShardReader, unit: Unit, write: Callable[[int, torch.Tensor], Pending]) -> None:
    """Read this rank's elements of a tensor and give them to `write` piece by piece."""
    for start, end in pieces_of(unit):
        write(start, reader.read(start, end)).wait()
