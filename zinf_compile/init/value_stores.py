"""Stores of parameters' values until these are partitioned: their unit, or host memory for now."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from zinf_compile.runtime.comm.shard_group import ShardGroup
from zinf_compile.runtime.comm.shard_ranges import shard_numel, shard_range
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.transfer.move import Location, move, on_host, route_of
from zinf_compile.runtime.units.backing import NvmeBacking
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import gather_whole

from .materializing import ValueStore
from .parallel_random import Fill
from .shard_writer import PieceWriter, pieces_of


def part_of_unit(whole: torch.Tensor, shard: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Fill a unit's shard with this rank's part of the flat whole; return the shard."""
    parts, wholes = unit.split(shard, whole)
    for part, stretch in zip(parts, wholes, strict=True):
        part_of(stretch, part, unit.shard_group)
    return shard


def part_of(whole: torch.Tensor, shard: torch.Tensor, group: ShardGroup) -> torch.Tensor:
    """Fill a shard with this rank's part of a flat tensor; return the shard."""
    start, end = shard_range(whole.numel(), group.size, group.rank)
    shard[: end - start].copy_(whole[start:end])
    shard[end - start :].zero_()
    return shard


def keep(unit: Unit, fill: Callable[[torch.Tensor], torch.Tensor]) -> Pending:
    """Start to keep a unit's shard, which `fill` fills and returns: memory of the device only where it stays there."""
    if unit.backing is None:
        return unit.start_saving(fill(unit.blank()))
    host = unit.context.link.host_buffer(unit.shard_numel, unit.dtype)
    return unit.start_saving(fill(host), from_host=True)


def gather(shard: torch.Tensor, into: torch.Tensor, context: Context, name: str) -> None:
    """Fill a flat tensor of the host from all ranks' shards."""
    with filled_on(shard.device, into, context) as full:
        pending = context.lanes.gather.submit(lambda: context.gathers.all_gather([shard], [full]))
        context.finish(pending, f"gathering {name}")


@contextlib.contextmanager
def filled_on(device: torch.device, into: torch.Tensor, context: Context) -> Iterator[torch.Tensor]:
    """Context with what a gather may fill on a device, so that a flat tensor is filled afterwards, wherever that is."""
    full = into if into.device == device else context.full_buffer(into.numel(), into.dtype, device)
    yield full
    if full is not into:
        into.copy_(full)


class UnitValues:
    """The unit's own shard, on any tier: values saved here are final."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def load(self, into: torch.Tensor) -> None:
        """See `ValueStore.load`."""
        unit = self._unit
        if unit.backing is not None and unit.shard_group.size == 1:
            move(unit.backing.location(0, into.numel()), on_host(into), by=route_of(unit.context)).wait()
        elif into.device == unit.device:
            gather_whole(unit, unit.load(), into, f"gathering {unit.name}")
        else:
            self._gather_in_tiles(into)

    def _gather_in_tiles(self, into: torch.Tensor) -> None:
        """Fill memory of the host by way of a device that need not have room for the whole."""
        unit, context = self._unit, self._unit.context
        shard = unit.shard if unit.backing is None else unit.resident
        if shard is None:
            shard = unit.read_to_host()
        for own, whole in zip(*unit.split(shard, into), strict=True):
            part = own.to(unit.device)
            with filled_on(unit.device, whole, context) as full:
                pending = context.lanes.gather.submit(functools.partial(unit.gathers.all_gather, [part], [full]))
                context.finish(pending, f"gathering {unit.name}")

    def save(self, whole: torch.Tensor) -> Pending:
        """See `ValueStore.save`."""
        unit = self._unit
        if unit.backing is not None and unit.shard_group.size == 1:
            return move(on_host(whole), unit.backing.location(0, whole.numel()), by=route_of(unit.context))
        return keep(unit, lambda shard: part_of_unit(whole, shard, unit))

    def fill(self, fill: Fill, writer: PieceWriter) -> bool:
        """See `ValueStore.fill`."""
        if not isinstance(self._unit.backing, NvmeBacking):
            return False
        pieces = pieces_of(self._unit)
        for piece, make in zip(pieces, fill.parts(piece.start for piece in pieces), strict=True):
            writer.write(self._unit, piece, make)
        return True


class HostValues:
    """Host memory: this rank's part of values that are cut over all ranks of a context, as units made later are."""

    def __init__(self, context: Context, name: str) -> None:
        self._context, self._name = context, name
        self._shard = torch.empty(0)

    def load(self, into: torch.Tensor) -> None:
        """See `ValueStore.load`."""
        gather(self._shard, into, self._context, self._name)

    def save(self, whole: torch.Tensor) -> Pending:
        """See `ValueStore.save`."""
        group = self._context.ranks.shard_group
        numel = shard_numel(whole.numel(), group.size)
        if (self._shard.numel(), self._shard.dtype) != (numel, whole.dtype):
            self._shard = torch.empty(numel, dtype=whole.dtype)
        part_of(whole, self._shard, group)
        return Done()

    def fill(self, fill: Fill, writer: PieceWriter) -> bool:
        """See `ValueStore.fill`."""
        return False

    def hand_over(self, shard: torch.Tensor, *, on_device: bool = True) -> torch.Tensor:
        """Fill a shard with this rank's part, and keep that no longer; return the shard."""
        move(on_host(self._shard), Location(shard, on_device=on_device), by=route_of(self._context)).wait()
        self._shard = torch.empty(0)
        return shard


__all__ = ["HostValues", "UnitValues", "ValueStore", "gather", "keep", "part_of"]
