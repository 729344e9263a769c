"""Reads this rank's shard of a saved tensor piece by piece, in the order of the parameter's memory.

Called by `load`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from zinf_compile.runtime.units.unit import Unit

from .checkpoint_files import CheckpointFiles, LaterReading, Reading
from .rectangles import Rectangle, cut_rectangles
from .shard_parts import Stretch, memory_order, stretches_of


class ShardReader:
    """The elements of one saved tensor that a unit has on this rank; padding is zeros. `stride`: its own, if not the unit's."""

    def __init__(self, files: CheckpointFiles, key: str, unit: Unit, stride: Sequence[int] | None = None) -> None:
        self._files, self._key = files, key
        self._shape = files.tensors[key].shape
        self._stretches: list[Stretch] = stretches_of(unit.spans, unit.shard_group.rank, torch.Size(self._shape).numel())
        self._order = memory_order(self._shape, unit.stride if stride is None else stride)

    def begin(self, start: int, end: int) -> ShardReading:
        """Start to read the elements [start, end) of the shard."""
        found = []
        for first, last, place in self._stretches:
            low, high = max(place, start), min(place + last - first, end)
            if low < high:
                found.append((self._begin(first + low - place, high - low), low - start, high - start))
        return ShardReading(found, end - start, self._files.tensors[self._key].dtype)

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return the elements [start, end) of the shard, in the type in which they were saved."""
        piece = torch.empty(end - start, dtype=self._files.tensors[self._key].dtype)
        self.begin(start, end).finish(piece)
        return piece

    def _begin(self, start: int, numel: int) -> Reading:
        """Start to read elements of the dense tensor from number `start` on, in the order of its memory."""
        if self._order is None:
            return self._files.begin(self._key, start, numel)
        return LaterReading(partial(self._rearrange, self._order, start))

    def _rearrange(self, order: tuple[int, ...], start: int, into: torch.Tensor) -> None:
        done, sizes = 0, [self._shape[dim] for dim in order]
        for rectangle in cut_rectangles(sizes, start, start + into.numel()):
            places = sorted(range(len(sizes)), key=order.__getitem__)
            logical = Rectangle(tuple(rectangle.offsets[p] for p in places), tuple(rectangle.sizes[p] for p in places))
            values = self._files.read_rectangle(self._key, logical).permute(order)
            into[done : done + rectangle.numel] = values.reshape(-1)
            done += rectangle.numel


class ShardReading:
    """Elements of a shard in flight: the reads, and where in a flat tensor each one goes."""

    def __init__(self, readings: Sequence[tuple[Reading, int, int]], numel: int, dtype: torch.dtype) -> None:
        self._readings, self._numel, self._dtype = readings, numel, dtype

    def finish(self, into: torch.Tensor) -> None:
        """Fill a flat tensor, of any type and device. Raises `CheckpointError` where a file is damaged."""
        direct = into.dtype == self._dtype and into.device.type == "cpu" and into.is_contiguous()
        piece = into if direct else torch.empty(self._numel, dtype=self._dtype)
        if sum(high - low for _, low, high in self._readings) < self._numel:
            piece.zero_()
        for reading, low, high in self._readings:
            reading.finish(piece[low:high])
        if not direct:
            into.copy_(piece)


def whole_reading(files: CheckpointFiles, key: str, start: int, end: int) -> ShardReading:
    """Start to read elements of a tensor that is whole on each rank, in row-major order."""
    return ShardReading([(files.begin(key, start, end - start), 0, end - start)], end - start, files.tensors[key].dtype)
