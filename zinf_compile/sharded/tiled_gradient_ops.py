"""Changes of gradients that are off the device and too large to load whole: tile by tile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zinf_compile.runtime.units.shard_changes import spoiling
from zinf_compile.runtime.units.shard_values import OffloadedGradientShard
from zinf_compile.runtime.units.unit import Tile

from .gradient import ShardedGradient


def is_loaded_by_tile(gradient: ShardedGradient) -> bool:
    """Return whether a gradient is loaded tile by tile."""
    return gradient.offloaded is not None and bool(gradient.unit.tiles)


def change_parts(gradient: ShardedGradient, function: Callable[[Tile, torch.Tensor], object], operator: str) -> None:
    """Change a gradient in place, given each tile and this rank's elements of it.

    Where that ends after the first tile, reading the gradient raises `StepFailedError`: some tiles are changed.
    """
    offloaded = gradient.offloaded
    assert offloaded is not None, "only offloaded gradients are loaded by tile"
    values = OffloadedGradientShard(gradient.unit, offloaded)
    with gradient.unit.context.lanes.meter.waiting(), spoiling(values, operator) as begin:
        gradient.unit.wait_updated()  # a step may still have to read the old one
        for tile in gradient.unit.tiles:
            part = offloaded.load_part(tile)
            function(tile, part)
            begin(part)
            offloaded.store_part(tile, part)
    offloaded.stored()
