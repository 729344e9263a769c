"""A gradient that is off the device and too large to come back as a whole: what is done to it, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from zinf_compile.runtime.units.unit import Tile

if TYPE_CHECKING:
    from .gradient import ShardedGradient


def comes_in_parts(gradient: ShardedGradient) -> bool:
    """Say whether a gradient is brought tile by tile."""
    return gradient.away is not None and bool(gradient.unit.tiles)


def part_of_gradient(gradient: ShardedGradient, tile: Tile) -> torch.Tensor:
    """Return this rank's elements of a tile's gradient, padding included; a copy, where they come from a drive."""
    away = gradient.away
    if away is None:
        return tile.part(gradient.local())
    with tile.context.meter.waiting():
        return away.load_part(tile)


def valid_parts(gradient: ShardedGradient) -> Iterator[torch.Tensor]:
    """Yield this rank's elements without padding: tile by tile, wherever they are, so that sums over them have the same bits."""
    unit = gradient.unit
    if not unit.tiles:
        yield gradient.local()[: unit.valid]
        return
    for tile in unit.tiles:
        yield part_of_gradient(gradient, tile)[: tile.valid]


def change_parts(gradient: ShardedGradient, function: Callable[[Tile, torch.Tensor], object]) -> None:
    """Change a gradient in place, given each tile and this rank's elements of it."""
    away = gradient.away
    assert away is not None, "it comes in parts"
    with gradient.unit.context.meter.waiting():
        gradient.unit.settle()  # a step may still have to read the old one
        for tile in gradient.unit.tiles:
            part = away.load_part(tile)
            function(tile, part)
            away.store_part(tile, part)
    away.stored()
