"""A gradient that is off the device and too large to come back as a whole: what is done to it, tile by tile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zinf_compile.runtime.units.unit import Tile

from .gradient import ShardedGradient


def comes_in_parts(gradient: ShardedGradient) -> bool:
    """Return whether a gradient is loaded tile by tile."""
    return gradient.offloaded is not None and bool(gradient.unit.tiles)


def change_parts(gradient: ShardedGradient, function: Callable[[Tile, torch.Tensor], object]) -> None:
    """Change a gradient in place, given each tile and this rank's elements of it."""
    offloaded = gradient.offloaded
    assert offloaded is not None, "it comes in parts"
    with gradient.unit.context.lanes.meter.waiting():
        gradient.unit.wait_updated()  # a step may still have to read the old one
        for tile in gradient.unit.tiles:
            part = offloaded.load_part(tile)
            function(tile, part)
            offloaded.store_part(tile, part)
    offloaded.stored()
