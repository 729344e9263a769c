"""The gradient of a unit that is computed, reduced and offloaded tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.lanes import All, Pending
from zinf_compile.runtime.memory.inflight import InflightQueue
from zinf_compile.runtime.memory.leaving_norms import LeavingNorm

from .backing import HostBacking
from .offloaded_gradient import OffloadedGradient, offloaded_to_drive
from .swap import copy_out, norms_of, swap_out, write_out
from .unit import Tile, Unit

TILES_UNDER_WAY = 2
"""Gradient shards of a unit's tiles, in flight from the device, which cannot hold them all."""


class TileGradients:
    """One gradient in the making: memory for all of it where it will live, which each tile's part goes to."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._shard: torch.Tensor | OffloadedGradient | None = None
        self._pending: list[Pending] = []
        self._offloading = InflightQueue(TILES_UNDER_WAY)
        """Transfers that free memory of the device."""
        self._norms: dict[Tile, Sequence[LeavingNorm]] = {}
        """Of the tiles' gradients."""
        self.on_device = not unit.context.link.topology.is_offloaded(unit.placement.grads)
        """Whether it is kept on the device, where it is reduced."""

    def reduce_buffer(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device for a tile's reduced shard."""
        unit = self._unit
        if not self.on_device:
            shard = torch.empty(tile.shard_numel, dtype=dtype, device=unit.device)
            unit.context.memory.ledger.track("grads", shard)
            return shard
        if self._shard is None:
            self._shard = torch.empty(unit.shard_numel, dtype=dtype, device=unit.device)
            unit.context.memory.ledger.track("grads", self._shard)
        assert isinstance(self._shard, torch.Tensor), "a gradient that stays is on the device"
        return tile.part(self._shard)

    def reduced(self, pending: Pending) -> None:
        """Note when a tile's shard is in its buffer."""
        self._pending.append(pending)

    def swap_out(
        self, tile: Tile, shard: torch.Tensor | OffloadedGradient, dst: str, reduction: Pending
    ) -> tuple[torch.Tensor | OffloadedGradient, Pending]:
        """Start one hop of a tile's shard, as `swap_out` does for a whole unit."""
        unit = self._unit
        self._norms[tile] = norms_of(tile, shard)
        tier = unit.placement.grads
        if self.on_device or (not Tier(dst).in_memory and unit.gradient_pool is None):
            return shard, reduction
        if isinstance(shard, torch.Tensor):
            with unit.context.lanes.meter.waiting():
                self._offloading.make_room(1)
        if dst != tier:  # in flight
            staged, after = swap_out(tile, shard, dst, reduction)
            assert isinstance(staged, OffloadedGradient), "it is in host memory"
            self._offloading.add(staged.arriving, 1)
            return staged, after
        if tier == Tier.HOST:
            assert isinstance(shard, torch.Tensor), "a gradient leaves the device once"
            offloaded = self._gradient_on_host(shard.dtype)
            resident = offloaded.backing.resident
            assert resident is not None, "it is host memory"
            return offloaded, self._left(copy_out(unit.context, shard, tile.part(resident), reduction), reduction)
        unit.wait_updated()  # its last gradient may still be in the place of this one
        offloaded = self._gradient_on_drive(shard.dtype)
        return offloaded, self._left(
            write_out(offloaded.backing, unit.context, shard, reduction, start=tile.span.place), reduction
        )

    def _left(self, pending: Pending, reduction: Pending) -> Pending:
        self._pending.append(pending)
        self._offloading.add(pending, 1)
        return reduction

    def whole(self) -> tuple[torch.Tensor | OffloadedGradient, Pending]:
        """Return the shard of the unit, once all tiles are in flight, and what to wait for until they have arrived."""
        assert self._shard is not None, "each graph that has one tile's gradient has all"
        pending: Pending = All(self._pending[::-1])  # the last one's end is that of many
        if isinstance(self._shard, OffloadedGradient):
            self._shard.arrive(pending)
            self._shard.norms = [self._norms.get(tile, ()) for tile in self._unit.tiles]
        return self._shard, pending

    def _gradient_on_host(self, dtype: torch.dtype) -> OffloadedGradient:
        if self._shard is None:
            unit = self._unit
            host = unit.context.link.host_buffer(unit.shard_numel, dtype)
            unit.context.memory.host_ledger.track("grads", host)
            self._shard = OffloadedGradient(unit, HostBacking(host), unit.shard_numel, dtype)
        assert isinstance(self._shard, OffloadedGradient), "it never stays"
        return self._shard

    def _gradient_on_drive(self, dtype: torch.dtype) -> OffloadedGradient:
        if self._shard is None:
            unit = self._unit
            assert unit.gradient_pool is not None, "its tier is a drive"
            self._shard = offloaded_to_drive(unit, *unit.gradient_pool, unit.shard_numel, dtype)
        assert isinstance(self._shard, OffloadedGradient), "it never stays"
        return self._shard
