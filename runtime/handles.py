"""The values that a register may hold while a transfer is under way, or in its place; `SwapHandle` is in `units.swap`."""

from __future__ import annotations

import torch

from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.units.offloaded_gradient import OffloadedGradient
from zinf_compile.runtime.units.swap import SwapHandle
from zinf_compile.runtime.units.tiled_gradient import TileGradients
from zinf_compile.runtime.units.unit import Tile, Unit

from .context import Context


class GatherHandle:
    """A handle: the full unit, usable once `pending` is over; None where nothing travels."""

    __slots__ = ("dtype", "full", "pending", "stays", "what")

    def __init__(
        self,
        full: torch.Tensor,
        pending: Pending | None,
        what: str = "",
        dtype: torch.dtype | None = None,
        *,
        stays: Unit | None = None,
    ) -> None:
        self.full = full
        self.stays = stays
        """The unit, where its full copy is to stay on the device."""
        self.pending = pending
        self.what = what
        """What is under way, for errors."""
        self.dtype = dtype
        """The type to cast the unit to, where that is another than it arrives in."""


def unit_and_tile(unit: Unit | Tile) -> tuple[Unit, Tile | None]:
    """Return a tile's unit and the tile, or the unit itself and None."""
    return (unit.unit, unit) if isinstance(unit, Tile) else (unit, None)


class HeldCopy:
    """In the place of a swap: the device has a full copy of the unit."""

    __slots__ = ("unit",)

    def __init__(self, unit: Unit | Tile) -> None:
        self.unit = unit


class HeldShard(SwapHandle):
    """In the place of a swap: the shard is on the device already."""

    __slots__ = ()


class ReduceHandle:
    """A gradient's shard, usable once `reduction` is over, before it is known where it will live."""

    __slots__ = ("at_home", "reduction", "shard", "together", "unit")

    def __init__(
        self,
        unit: Unit | Tile,
        shard: torch.Tensor | OffloadedGradient,
        reduction: Pending,
        together: TileGradients | None = None,
        *,
        at_home: bool = False,
    ) -> None:
        self.unit = unit
        self.shard = shard
        self.reduction = reduction
        self.together = together
        """The gradient of all tiles, where this is of one tile."""
        self.at_home = at_home
        """Whether all hops to its tier have begun, also those that the graph doesn't have."""


class Reduction:
    """A gradient's reduction and offload; `wait` names graph and unit when it breaks."""

    __slots__ = ("_context", "_what", "awaited")

    def __init__(self, pending: Pending, context: Context, what: str) -> None:
        self.awaited = pending
        """The transfer that `wait` waits for."""
        self._context = context
        self._what = what

    def wait(self) -> None:
        """Return when the shard may be used."""
        self._context.finish(self.awaited, self._what)
