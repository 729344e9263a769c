"""A row tile of a large parameter: gathered, swapped and released by itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from zinf_compile.ir.tiers import Placement
from zinf_compile.ir.tiling import box_text, tile_shape, tile_stride
from zinf_compile.runtime.lanes.lanes import Pending

from .dense import Dense

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context

    from .backing import Home
    from .unit import Unit


class Tile(Dense):
    """What a schedule moves of a unit in one go. Where its shard is, and whatever is done to it, is the unit's."""

    def __init__(self, unit: Unit, number: int) -> None:
        box = unit.boxes[number]
        super().__init__(tile_shape(box), tile_stride(box, unit.stride), unit.dtype, unit.device)
        self._unit = weakref.ref(unit)
        self._text = box_text(box, unit.shape)
        self.stretch = unit.stretches[number]
        self.context: Context = unit.context
        self._whole: torch.Tensor | None = None

    @property
    def unit(self) -> Unit:
        """The unit it is a part of."""
        unit = self._unit()
        assert unit is not None, "a tile is used by who has its unit"
        return unit

    @property
    def name(self) -> str:
        """The parameter's name, and which part it is."""
        return self.unit.name + self._text

    @property
    def placement(self) -> Placement:
        """See `Unit.placement`."""
        return self.unit.placement

    @property
    def reduce_dtype(self) -> torch.dtype:
        """See `Unit.reduce_dtype`."""
        return self.unit.reduce_dtype

    @property
    def home(self) -> Home | None:
        """See `Unit.home`; the home of all tiles."""
        return self.unit.home

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's part, padding included."""
        return self.stretch.shard_numel

    @property
    def valid(self) -> int:
        """Elements of this rank's part that are not padding."""
        start, end = self.stretch.part_of(self.context.rank)
        return end - start

    def split(self, shard: torch.Tensor, full: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """See `Unit.split`; a tile moves as one."""
        return [shard], [full]

    def part(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the tile's part of a shard of the unit."""
        return shard[self.stretch.place : self.stretch.place + self.shard_numel]

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements; only where they are on the device."""
        return self.part(self.unit.shard)

    @property
    def resident(self) -> torch.Tensor | None:
        """The same, where their home is host memory."""
        shard = self.unit.resident
        return None if shard is None else self.part(shard)

    def read(self, into: torch.Tensor) -> Pending:
        """See `Unit.read`."""
        return self.unit.read(into, self.stretch.place)

    def whole(self) -> torch.Tensor:
        """On a single rank: the tile's values, sharing memory with the shard but with a storage of its own."""
        shard = self.shard
        if self._whole is None or self._whole.data_ptr() != shard.data_ptr():  # moved, as a unit's may be
            self._whole = self.logical(torch.utils.dlpack.from_dlpack(shard))
        return self._whole
