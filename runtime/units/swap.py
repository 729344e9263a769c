"""Hops of a unit's shard to its device, and of a gradient to its tier, as a schedule asks for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import SMALL_BYTES
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.memory.leaving_norms import LeavingNorm
from zinf_compile.runtime.system.accelerator import current_stream
from zinf_compile.runtime.transfer.move import (
    Location,
    move,
    move_to_host_together,
    move_together,
    on_host,
    route_of,
    write_together,
)

from .backing import HostBacking, ShardBacking
from .offloaded_gradient import OffloadedGradient, offloaded_to_drive
from .pending_updates import Updates, begin_after_landing
from .unit import Tile, Unit

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context


S = TypeVar("S", bound="torch.Tensor | OffloadedGradient")


class SwapHandle:
    """A swap in of a unit: `shard` is filled once `pending` is over."""

    __slots__ = ("pending", "shard", "unit")

    def __init__(self, unit: Unit | Tile, shard: torch.Tensor, pending: Pending | None = None) -> None:
        self.unit = unit
        self.shard = shard
        self.pending = pending


def swap_in(unit: Unit | Tile, src: str, dst: str, earlier: SwapHandle | None) -> SwapHandle:
    """Start the hop from tier `src` to `dst`, after an `earlier` one.

    A unit that lives nearer than the graph has planned skips hops; one that lives farther takes those that are missing before.
    """
    if unit.backing is None:
        return SwapHandle(unit, unit.shard, unit.updated())
    context = unit.context
    resident = unit.resident
    if not Tier(src).in_memory:
        if resident is not None:
            return SwapHandle(unit, resident)  # the next hop comes after its update
        host = _host_buffer(unit, dst)
        return SwapHandle(unit, host, move(unit.location(), on_host(host), by=route_of(context)))
    if earlier is None and resident is None:
        earlier = swap_in(unit, unit.backing.tier, Tier.HOST, None)
    source = earlier.shard if earlier is not None else resident
    assert source is not None, "what is on a drive comes to host memory first"
    device = _device_buffer(unit)
    after = earlier.pending if earlier is not None else None
    stream = current_stream(unit.device)  # in whose order the buffer was made

    def copy() -> Pending:
        with stream or contextlib.nullcontext():
            return move(on_host(source), Location(device), by=route_of(context), after=after)

    if after is None and unit.updated() is not None:
        return SwapHandle(unit, device, unit.begin_updated(copy))
    return SwapHandle(unit, device, begin_after_landing(after, copy))


def is_small_on_drive(unit: Unit | Tile) -> bool:
    """Say whether a unit's shard is on a drive, and is best read with others: see `read_together`."""
    on_drive = unit.backing is not None and unit.resident is None
    return on_drive and unit.format.bytes(unit.shard_numel) <= SMALL_BYTES


def read_together(units: Sequence[Unit | Tile], dst: str) -> list[SwapHandle]:
    """Start the hop of several small units of a context from drives to host memory; see `swap_in`."""
    handles = [SwapHandle(unit, _host_buffer(unit, dst)) for unit in units]
    rows = [(unit.location(), handle.shard) for unit, handle in zip(units, handles, strict=True)]
    for handle, reading in zip(handles, move_together(rows, by=route_of(units[0].context), write=False), strict=True):
        handle.pending = reading
    return handles


def _host_buffer(unit: Unit | Tile, dst: str) -> torch.Tensor:
    """Return host memory for a shard that is read from a drive on its way to tier `dst`, counted."""
    memory = unit.context.memory
    if dst == Tier.HOST:
        return memory.staged_buffer(unit.shard_numel, unit.dtype)
    memory.make_room(memory.ledger, unit.format.bytes(unit.shard_numel))
    host = unit.context.link.host_buffer(unit.shard_numel, unit.dtype)
    memory.ledger.track("gathered", host)
    return host


def _device_buffer(unit: Unit | Tile) -> torch.Tensor:
    """Return memory of the device for a shard, counted."""
    (buffer,) = _device_buffers([unit])
    return buffer


def _device_buffers(units: Sequence[Unit | Tile]) -> list[torch.Tensor]:
    """Return memory of the device for shards, counted: of the arena, but for one that may stay as the full copy of its unit."""
    context = units[0].context
    memory, link = context.memory, context.link
    memory.make_room(memory.ledger, sum(unit.format.bytes(unit.shard_numel) for unit in units))
    buffers: dict[int, torch.Tensor] = {}
    passing: dict[torch.dtype, list[int]] = {}
    for number, unit in enumerate(units):
        if isinstance(unit, Unit) and unit.full_copy_numel == unit.shard_numel:
            buffers[number] = link.device_buffer(unit.shard_numel, unit.dtype, lasting=True)
        else:
            passing.setdefault(unit.dtype, []).append(number)
    for dtype, numbers in passing.items():
        lent = link.device_buffers([units[number].shard_numel for number in numbers], dtype)
        buffers.update(zip(numbers, lent, strict=True))
    found = [buffers[number] for number in range(len(units))]
    memory.ledger.track("gathered", *found)
    return found


def bring(unit: Unit | Tile) -> SwapHandle:
    """Start all hops of a unit to its device, for a graph that has none: it was compiled for one that lives there."""
    assert unit.backing is not None, "it is somewhere else"
    handle: SwapHandle | None = None
    for src, dst in itertools.pairwise(unit.context.link.topology.hops(unit.backing.tier)):
        handle = swap_in(unit, src, dst, handle)
    assert handle is not None, "what has a backing takes a hop"
    return handle


def swap_in_together(units: Sequence[Unit | Tile], updates: Updates[Any] | None) -> list[SwapHandle]:
    """Start one copy of several units of a context to their device, all from host memory.

    Where a step has still to update them, once it has: `updates`, which are those of all of them, and none is a tile.
    """
    sources = list[torch.Tensor]()
    for unit in units:
        source = unit.resident
        assert source is not None, "it is in host memory"
        sources.append(source)
    if updates is None:
        return _copy_together(units, sources, lambda copy: copy(()))
    read = [(unit, 0, unit.shard_numel) for unit in units]
    return _copy_together(units, sources, lambda copy: updates.begin_after(read, lambda: copy(())))


def pass_on_together(earlier: Sequence[SwapHandle]) -> list[SwapHandle]:
    """Start one copy of several units of a context to their device, which one read brings to host memory."""
    reading = earlier[0].pending
    assert reading is not None, "it is under way"
    units, sources = [handle.unit for handle in earlier], [handle.shard for handle in earlier]
    return _copy_together(units, sources, lambda copy: copy([reading]))


def _copy_together(
    units: Sequence[Unit | Tile],
    sources: Sequence[torch.Tensor],
    begin: Callable[[Callable[[Sequence[Pending]], Pending]], Pending],
) -> list[SwapHandle]:
    """Take memory of the device for several units, and `begin` the copy to it, which comes after what it is called with."""
    link, buffers = units[0].context.link, _device_buffers(units)
    stream = current_stream(units[0].device)  # in whose order the buffers were made

    def copy(after: Sequence[Pending]) -> Pending:
        with stream or contextlib.nullcontext():
            return link.to_device_together(sources, buffers, after)

    arriving = begin(copy)
    return [SwapHandle(unit, buffer, arriving) for unit, buffer in zip(units, buffers, strict=True)]


def swap_out(
    unit: Unit | Tile, shard: torch.Tensor | OffloadedGradient, dst: str, reduction: Pending
) -> tuple[torch.Tensor | OffloadedGradient, Pending]:
    """Start the hop of a gradient to tier `dst`; return its shard there."""
    context = unit.context
    if unit.placement.grads == Tier.DEVICE:  # too small to go, or partitioned under other options
        return shard, reduction
    if dst == Tier.HOST:
        assert isinstance(shard, torch.Tensor), "a gradient leaves the device once"
        ((offloaded, host),) = _offloaded_to_host(context, [(unit, shard)])
        if unit.placement.grads == Tier.HOST:
            offloaded.arrive(copy_out(context, shard, host, reduction))
        else:  # bounded by what it goes on to
            offloaded.arrive(move(Location(shard), on_host(host), by=route_of(context), after=reduction))
        return offloaded, Done()
    assert isinstance(unit, Unit), "a tile's gradient has its place among those of all tiles"
    if unit.gradient_pool is None:  # its tier is the host
        return shard, reduction
    offloaded = _offloaded_to_drive(unit, shard)
    offloaded.arrive(write_out(offloaded.backing, context, shard, reduction))
    return offloaded, Done()


def _offloaded_to_drive(unit: Unit, shard: torch.Tensor | OffloadedGradient) -> OffloadedGradient:
    """Return a gradient with space on a drive, that its shard is about to be written to."""
    assert unit.gradient_pool is not None, "its tier is a drive"
    unit.wait_updated()  # its last gradient may still be in the place of this one
    numel = shard.numel if isinstance(shard, OffloadedGradient) else shard.numel()
    offloaded = offloaded_to_drive(unit, *unit.gradient_pool, numel, shard.dtype)
    offloaded.norms = (norms_of(unit, shard),)
    return offloaded


def norms_of(unit: Unit | Tile, shard: torch.Tensor | OffloadedGradient) -> Sequence[LeavingNorm]:
    """Return the norms of a gradient on its way, as they were taken on the device; none where it was changed since."""
    if isinstance(shard, torch.Tensor):
        return unit.context.leaving_norms.of(shard)
    return () if shard.version or not shard.norms else shard.norms[0]


def is_small_for_drive(unit: Unit | Tile, shard: torch.Tensor | OffloadedGradient) -> bool:
    """Say whether a gradient in host memory goes to a drive, and is best written with others: see `write_out_together`."""
    to_drive = isinstance(unit, Unit) and unit.gradient_pool is not None and not unit.placement.grads.in_memory
    return to_drive and _bytes_of(shard) <= SMALL_BYTES


def write_out_together(
    leaving: Sequence[tuple[Unit | Tile, torch.Tensor | OffloadedGradient, Pending]],
) -> list[tuple[OffloadedGradient, Pending]]:
    """Start to write several small gradients of a context to their drive once all are in host memory; see `swap_out`."""
    found = list[tuple[OffloadedGradient, Pending]]()
    for part in _within_limit(leaving):
        found += _write_out_together(part)
    return found


def _write_out_together(
    leaving: Sequence[tuple[Unit | Tile, torch.Tensor | OffloadedGradient, Pending]],
) -> list[tuple[OffloadedGradient, Pending]]:
    context = leaving[0][0].context
    places, rows, before = list[OffloadedGradient](), list[tuple[Location, torch.Tensor]](), dict[Pending, None]()
    for unit, shard, reduction in leaving:
        assert isinstance(unit, Unit), "a tile's gradient has its place among those of all tiles"
        offloaded = _offloaded_to_drive(unit, shard)
        host = shard.backing.resident if isinstance(shard, OffloadedGradient) else shard
        assert host is not None, "it comes from host memory"
        before[_Written(shard) if isinstance(shard, OffloadedGradient) else reduction] = None
        places.append(offloaded)
        rows.append((offloaded.backing.location(0, offloaded.numel), host))
    with context.lanes.meter.waiting():
        writing = write_together(rows, by=route_of(context), after=list(before), room=context.memory.inflight_gradients)
    for offloaded in places:
        offloaded.arrive(writing)
    return [(offloaded, Done()) for offloaded in places]


def stays_on_host(unit: Unit | Tile, shard: torch.Tensor | OffloadedGradient) -> bool:
    """Say whether a gradient goes from the device to host memory, and no farther: see `swap_out_together`."""
    return unit.placement.grads == Tier.HOST and isinstance(shard, torch.Tensor)


def swap_out_together(
    leaving: Sequence[tuple[Unit | Tile, torch.Tensor, Pending]],
) -> list[tuple[OffloadedGradient, Pending]]:
    """Start to copy several gradients of a context to the host, each behind its reduction.

    One copy for half of what may be under way at a time: it can be issued while another one is. Returns their shards there, as
    `swap_out` does for one.
    """
    found = list[tuple[OffloadedGradient, Pending]]()
    for part in _within_limit(leaving):
        found += _copy_out_together(part[0][0].context, part)
    return found


def _within_limit(leaving: Sequence[tuple[Unit | Tile, S, Pending]]) -> Iterator[Sequence[tuple[Unit | Tile, S, Pending]]]:
    """Cut a row of gradients into parts of half of what may be under way at a time."""
    limit = leaving[0][0].context.memory.inflight_gradients.limit
    start, held = 0, 0
    for number, (_, shard, _) in enumerate(leaving):
        size = _bytes_of(shard)
        if limit is not None and number > start and held + size > limit // 2:
            yield leaving[start:number]
            start, held = number, 0
        held += size
    yield leaving[start:]


def _bytes_of(shard: torch.Tensor | OffloadedGradient) -> int:
    return format_of(shard.dtype).bytes(shard.numel) if isinstance(shard, OffloadedGradient) else shard.nbytes


def _copy_out_together(
    context: Context, leaving: Sequence[tuple[Unit | Tile, torch.Tensor, Pending]]
) -> list[tuple[OffloadedGradient, Pending]]:
    places = _offloaded_to_host(context, [(unit, shard) for unit, shard, _ in leaving])
    with context.lanes.meter.waiting():
        copying = move_to_host_together(
            [shard for _, shard, _ in leaving],
            [host for _, host in places],
            by=route_of(context),
            after=list(dict.fromkeys(reduction for _, _, reduction in leaving)),
            room=context.memory.inflight_gradients,
        )
    for offloaded, _ in places:
        offloaded.arrive(copying)
    return [(offloaded, Done()) for offloaded, _ in places]


def _offloaded_to_host(
    context: Context, shards: Sequence[tuple[Unit | Tile, torch.Tensor]]
) -> list[tuple[OffloadedGradient, torch.Tensor]]:
    """Return gradients with host memory that their shards are about to be copied to, and that memory."""
    ledger = context.memory.host_ledger
    context.memory.make_room(ledger, sum(shard.nbytes for _, shard in shards))
    hosts = [context.link.host_buffer(shard.numel(), shard.dtype) for _, shard in shards]
    ledger.track("grads", *hosts)
    found = []
    for (unit, shard), host in zip(shards, hosts, strict=True):
        offloaded = OffloadedGradient(unit, HostBacking(host), shard.numel(), shard.dtype)
        offloaded.norms = (norms_of(unit, shard),)
        found.append((offloaded, host))
    return found


def copy_out(context: Context, shard: torch.Tensor, host: torch.Tensor, reduction: Pending) -> Pending:
    """Start to copy a gradient from the device to the host memory where it stays, within the limit of those under way."""
    with context.lanes.meter.waiting():
        return move(Location(shard), on_host(host), by=route_of(context), after=reduction, room=context.memory.inflight_gradients)


def write_out(
    backing: ShardBacking, context: Context, shard: torch.Tensor | OffloadedGradient, reduction: Pending, *, start: int = 0
) -> Pending:
    """Start to write a gradient to a drive, from element `start` of its backing on, once it is in host memory."""
    before = reduction
    if isinstance(shard, OffloadedGradient):
        host_memory = shard.backing.resident
        assert host_memory is not None, "it comes from host memory"
        before, shard = _Written(shard), host_memory
    with context.lanes.meter.waiting():
        place, room = backing.location(start, start + shard.numel()), context.memory.inflight_gradients
        return move(on_host(shard), place, by=route_of(context), after=before, room=room)


def offload(unit: Unit, shard: torch.Tensor, reduction: Pending) -> tuple[torch.Tensor | OffloadedGradient, Pending]:
    """Start all hops of a gradient to its tier, as the schedule does; return its shard there."""
    place: torch.Tensor | OffloadedGradient = shard
    for dst in unit.context.link.topology.hops(unit.placement.grads)[-2::-1]:
        place, reduction = swap_out(unit, place, dst, reduction)
    return place, reduction


class _Written:
    def __init__(self, gradient: OffloadedGradient) -> None:
        self._gradient = gradient

    def wait(self) -> None:
        self._gradient.wait_written()
