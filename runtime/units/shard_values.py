"""This rank's elements of a tensor that is partitioned like a parameter: where they are, and how to bring them piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import torch

from zinf_compile.errors import StepFailedError
from zinf_compile.runtime.lanes.lanes import Done, Pending

from .backing import ShardBacking
from .offloaded_gradient import OffloadedGradient
from .pieces import cut_pieces
from .unit import Unit

Fetch = Callable[[], torch.Tensor]
"""Returns a piece that is on its way, once it is there."""


class ShardValues(Protocol):
    """A shard of `unit.shard_numel` elements, padding included."""

    unit: Unit
    dtype: torch.dtype

    @property
    def changes(self) -> int:
        """A checksum of what was changed in place so far; equal on all ranks that did the same."""

    @property
    def resident(self) -> torch.Tensor | None:
        """The shard on the device, after all updates; None where it comes in pieces."""

    def fetch(self, start: int, end: int) -> Fetch:
        """Start to bring the piece [start, end) to host memory, where it may be changed."""

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """Start to keep a piece of host memory; it may not change meanwhile."""

    def changed(self, operator: str) -> None:
        """Note that an operator has changed the shard in place."""

    def spoil(self, why: str) -> None:
        """Note that a change ended in its middle: from now on `fetch` raises `StepFailedError`, until `restored`."""

    def restored(self) -> None:
        """Note that every element was overwritten."""


class _Counted:
    """Counts changes."""

    _changes = 0
    _spoiled = ""

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
        """See `ShardValues.fetch`."""
        return self.shard[start:end].cpu

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """See `ShardValues.write`."""
        place = self.shard[start : start + piece.numel()]
        if place.data_ptr() != piece.data_ptr():
            place.copy_(piece)
        return Done()


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
            return lambda: piece
        buffer = self.unit.context.memory.staged_buffer(end - start, self.dtype)
        reading = self.backing.read(buffer, start)

        def arrive() -> torch.Tensor:
            reading.wait()
            return buffer

        return arrive

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """See `ShardValues.write`."""
        return self.backing.write(piece, start)


class ParameterShard:
    """The shard of a partitioned parameter itself, as it is after its last step."""

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
        return place.fetch(start, end)

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """See `ShardValues.write`."""
        backing = self.unit.backing
        return DeviceShard(self.unit, self.unit.shard).write(start, piece) if backing is None else backing.write(piece, start)

    def spoil(self, why: str) -> None:
        """See `ShardValues.spoil`."""
        self.unit.spoil(why)

    def restored(self) -> None:
        """See `ShardValues.restored`."""
        self.unit.restored()

    def changed(self, operator: str) -> None:
        """See `ShardValues.changed`."""
        context, parameter = self.unit.context, self.unit.parameter()
        if context.size > 1:
            context.eager_changes = zlib.crc32(f"{operator} of unit {self.unit.serial}".encode(), context.eager_changes + 1)
            context.last_eager_change = f"{operator}() of {self.unit.name}, unit {self.unit.serial}"
        if parameter is not None:
            torch.autograd.graph.increment_version(parameter)


class OffloadedGradientShard(_Counted):
    """The shard of a gradient that is off the device."""

    resident: torch.Tensor | None = None

    def __init__(self, unit: Unit, away: OffloadedGradient) -> None:
        self.unit, self.dtype, self._away = unit, away.dtype, away

    def fetch(self, start: int, end: int) -> Fetch:
        """See `ShardValues.fetch`."""
        return lambda: self._away.load_piece(start, end)

    def write(self, start: int, piece: torch.Tensor) -> Pending:
        """See `ShardValues.write`."""
        self.unit.wait_updated()  # a step may still have to read the old one
        return self._away.backing.write(piece, start)

    def spoil(self, why: str) -> None:
        """See `ShardValues.spoil`."""
        self._away.spoiled = why

    def restored(self) -> None:
        """See `ShardValues.restored`."""
        self._away.spoiled = ""

    def changed(self, operator: str) -> None:
        """See `ShardValues.changed`."""
        super().changed(operator)
        self._away.stored()


def pieces_of(unit: Unit) -> list[tuple[int, int]]:
    """Return the pieces [start, end) in which shards like this unit's are brought."""
    return cut_pieces(unit.shard_numel, piece_numel=unit.placement.piece_numel, cuts=unit.cuts)
