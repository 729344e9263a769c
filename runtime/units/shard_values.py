"""Access to this rank's shard of a tensor that is partitioned like a parameter, piece by piece.

Called by eager operators on shards; each hop goes through `transfer.move`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import torch

from zinf_compile.errors import StepFailedError
from zinf_compile.ir.pieces import cut_pieces
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.transfer.move import Location, move, on_host, route_of

from .backing import ShardBacking
from .offloaded_gradient import OffloadedGradient
from .unit import Unit

Fetch = Callable[[], torch.Tensor]
"""Waits for a piece, and returns it."""


class ShardValues(Protocol):
    """A shard of `unit.shard_numel` elements, padding included."""

    unit: Unit
    dtype: torch.dtype

    @property
    def changes(self) -> int:
        """A checksum of all changes in place; equal on ranks that made the same ones."""

    @property
    def resident(self) -> torch.Tensor | None:
        """The shard on the device, after all updates; None where it comes in pieces."""

    def fetch(self, start: int, end: int) -> Fetch:
        """Start to bring the piece [start, end) to host memory, where it may be changed."""

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """Start to keep a piece of host memory; it may not change meanwhile."""

    def changing(self) -> None:
        """Note that the shard is about to be changed in place: a save in the background takes it first."""

    def changed(self, operator: str) -> None:
        """Note that an operator has changed the shard in place."""

    def spoil(self, why: str) -> None:
        """Mark the values incomplete: a change ended in its middle. `fetch` raises `StepFailedError` until `restored`."""

    def restored(self) -> None:
        """Note that every element was overwritten."""


class _Counted:
    """Counts changes."""

    _changes = 0
    _spoiled = ""

    def changing(self) -> None:
        """See `ShardValues.changing`: no save is under way for it."""

    def spoil(self, why: str) -> None:
        """See `ShardValues.spoil`."""
        self._spoiled = why

    def restored(self) -> None:
        """See `ShardValues.restored`."""
        self._spoiled = ""

    def check_whole(self) -> None:
        """Raise `StepFailedError` where a change ended in its middle."""
        if self._spoiled:
            raise StepFailedError(self._spoiled)

    @property
    def changes(self) -> int:
        """See `ShardValues.changes`."""
        return self._changes

    def changed(self, operator: str) -> None:
        """See `ShardValues.changed`."""
        self._changes = zlib.crc32(operator.encode(), self._changes + 1)


class DeviceShard(_Counted):
    """A shard on the device."""

    def __init__(self, unit: Unit, shard: torch.Tensor) -> None:
        self.unit, self.dtype, self.shard = unit, shard.dtype, shard

    def changed(self, operator: str) -> None:
        """See `ShardValues.changed`."""
        super().changed(operator)
        if not self.shard.is_inference():
            torch.autograd.graph.increment_version(self.shard)  # which PyTorch doesn't below autograd

    @property
    def resident(self) -> torch.Tensor | None:
        """See `ShardValues.resident`."""
        return self.shard

    def fetch(self, start: int, end: int) -> Fetch:
        """See `ShardValues.fetch`; memory of the CPU is changed where it is, also that of a simulated device."""
        piece = self.shard[start:end]
        if piece.device.type == "cpu":
            return lambda: piece
        return _fetched(self.unit, Location(piece), end - start, self.dtype)

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """See `ShardValues.write`."""
        place = self.shard[start : start + piece.numel()]
        return move(Location(piece, on_device=place.device.type == "cpu"), Location(place), by=route_of(self.unit.context))


class BackedShard(_Counted):
    """A shard in host memory beside a device with memory of its own, or on drives."""

    def __init__(self, unit: Unit, backing: ShardBacking, dtype: torch.dtype) -> None:
        self.unit, self.backing, self.dtype = unit, backing, dtype
        self.resident: torch.Tensor | None = None

    def fetch(self, start: int, end: int) -> Fetch:
        """See `ShardValues.fetch`."""
        self.check_whole()
        if self.backing.resident is not None:
            piece = self.backing.resident[start:end]
            self.unit.context.link.wait_read(piece)
            return lambda: piece
        return _fetched(self.unit, self.backing.location(start, end), end - start, self.dtype)

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """See `ShardValues.write`."""
        return _kept(self.unit, piece, self.backing, start)


class ParameterShard:
    """The shard of a partitioned parameter itself, as it is after its last step."""

    replaced: ShardValues | None = None
    """A copy of its values, made when the parameter was given others; None while the parameter has them."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.dtype = unit, unit.dtype

    @property
    def changes(self) -> int:
        """See `ShardValues.changes`; parameters of one group of ranks are counted together."""
        return self.unit.context.eager_changes

    @property
    def resident(self) -> torch.Tensor | None:
        """See `ShardValues.resident`."""
        self.unit.wait_updated()
        return self.unit.shard if self.unit.backing is None else None

    def fetch(self, start: int, end: int) -> Fetch:
        """See `ShardValues.fetch`."""
        backing = self.unit.backing
        self.unit.wait_updated()
        self.unit.check_whole()
        place = DeviceShard(self.unit, self.unit.shard) if backing is None else BackedShard(self.unit, backing, self.dtype)
        fetch = self.unit.reading(lambda: place.fetch(start, end))
        return lambda: self.unit.reading(fetch)

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """See `ShardValues.write`."""
        backing = self.unit.backing
        self.unit.changing(start, start + piece.numel())
        if backing is None:
            return DeviceShard(self.unit, self.unit.shard).write(start, piece)
        return _kept(self.unit, piece, backing, start)

    def changing(self) -> None:
        """See `ShardValues.changing`."""
        self.unit.changing()

    def spoil(self, why: str) -> None:
        """See `ShardValues.spoil`."""
        self.unit.spoil(why)

    def restored(self) -> None:
        """See `ShardValues.restored`."""
        self.unit.restored()

    def changed(self, operator: str) -> None:
        """See `ShardValues.changed`."""
        context, parameter = self.unit.context, self.unit.parameter()
        if self.unit.shard_group.size > 1:
            context.eager_changes = zlib.crc32(f"{operator} of unit {self.unit.serial}".encode(), context.eager_changes + 1)
            context.last_eager_change = f"{operator}() of {self.unit.name}, unit {self.unit.serial}"
        if parameter is not None:
            torch.autograd.graph.increment_version(parameter)


class OffloadedGradientShard(_Counted):
    """The shard of a gradient that is off the device."""

    resident: torch.Tensor | None = None

    def __init__(self, unit: Unit, gradient: OffloadedGradient) -> None:
        self.unit, self.dtype, self._gradient = unit, gradient.dtype, gradient

    def fetch(self, start: int, end: int) -> Fetch:
        """See `ShardValues.fetch`."""
        return lambda: self._gradient.load_piece(start, end)

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """See `ShardValues.write`."""
        self.unit.wait_updated()  # a step may still have to read the old one
        self._gradient.arriving.wait()  # else the transfer in flight would overwrite this
        return _kept(self.unit, piece, self._gradient.backing, start)

    def spoil(self, why: str) -> None:
        """See `ShardValues.spoil`."""
        self._gradient.spoiled = why

    def restored(self) -> None:
        """See `ShardValues.restored`."""
        self._gradient.spoiled = ""

    def changed(self, operator: str) -> None:
        """See `ShardValues.changed`."""
        super().changed(operator)
        self._gradient.stored()


def _fetched(unit: Unit, source: Location, numel: int, dtype: torch.dtype) -> Fetch:
    """Start to bring elements to host memory of their own."""
    buffer = unit.context.memory.staged_buffer(numel, dtype)
    reading = move(source, on_host(buffer), by=route_of(unit.context))

    def arrive() -> torch.Tensor:
        reading.wait()
        return buffer

    return arrive


def _kept(unit: Unit, piece: torch.Tensor, backing: ShardBacking, start: int) -> Pending:
    """Start to keep a piece of host memory from element `start` of a backing on."""
    return move(on_host(piece), backing.location(start, start + piece.numel()), by=route_of(unit.context))


def pieces_of(unit: Unit) -> list[tuple[int, int]]:
    """Return the pieces [start, end) in which shards like this unit's are loaded."""
    return cut_pieces(unit.shard_numel, piece_numel=unit.placement.piece_numel, cuts=unit.cuts)
