"""One hop of a shard between two tiers, and the hops of a piece between where it lives and where it is updated.

Called by units, the optimizer's chunks and the loading of values; knows tensors and places, no unit and no schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.device.link import DeviceLink
from zinf_compile.runtime.lanes.lanes import Done, Lane, Pending
from zinf_compile.runtime.lanes.stream_lane import StreamTransfer, on_stream
from zinf_compile.runtime.memory.inflight import InflightLimit

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a shard, or a piece of one, is: in memory (`tensor`), or on a drive, read to and written from host memory."""

    tensor: torch.Tensor | None = None
    on_device: bool = True
    read: Callable[[torch.Tensor], Pending] | None = None
    write: Callable[[torch.Tensor], Pending] | None = None


def on_host(tensor: torch.Tensor) -> Location:
    """Return the location of host memory."""
    return Location(tensor, on_device=False)


@dataclasses.dataclass(frozen=True)
class StagingBuffers:
    """Memory for a piece in flight; None on a side where its kind needs none."""

    host: torch.Tensor | None
    device: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """The link to the device, and the lane on which a write to a drive waits for what comes before it."""

    link: DeviceLink
    submit: Callable[[Callable[[], None]], Pending]


def route_of(context: Context) -> Route:
    """Return the route of a rank's shards and gradients: on the lane of swaps."""
    return Route(context.link, lambda job: context.lanes.start(context.lanes.swap, job))


def move(src: Location, dst: Location, *, by: Route, after: Pending | None = None, room: InflightLimit | None = None) -> Pending:
    """Start one hop of a shard, or of a piece of one, once `after` is over; return what to wait for.

    Between host memory and the device's own, or between host memory and a drive; never both. The source may not
    change until then. Within one memory the copy is made before `move` returns, and none is where both ends are the same.

    `room` bounds the bytes that are under way: `move` returns once there is room, which is given back when the hop is over.
    """
    source = src.tensor if src.tensor is not None else dst.tensor
    assert source is not None, "one end is memory"
    if src.tensor is not None and dst.tensor is not None and not crosses(src, dst, by.link):
        if not dst.on_device:
            by.link.wait_read(dst.tensor)
        return _copy(src.tensor, dst.tensor, after)
    size = source.nbytes
    if room is not None:
        room.acquire(size)
    try:
        if src.read is not None:
            assert after is None, "what is on a drive is there"
            assert room is None, "reads are bounded by the memory that they go to"
            by.link.wait_read(source)
            return src.read(source)
        if dst.write is not None:
            if after is None and room is None:
                return dst.write(source)
            return by.submit(_Write(source, dst.write, after, room))
        assert dst.tensor is not None, "a location is memory, or can be written"
        copying = (by.link.to_device if dst.on_device else by.link.to_host)(source, dst.tensor, after)
        if room is not None:
            _release_behind(copying, room, size, by)
    except BaseException:  # an interrupt while the lane is busy
        if room is not None:
            room.release(size)
        raise
    return copying


def move_to_host_together(
    sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], *, by: Route, after: Sequence[Pending], room: InflightLimit
) -> Pending:
    """Start one hop of several shards from the device's own memory, as one copy; see `move`."""
    size = sum(source.nbytes for source in sources)
    room.acquire(size)
    try:
        copying = by.link.to_host_together(sources, into, after)
        _release_behind(copying, room, size, by)
    except BaseException:  # an interrupt while the lane is busy
        room.release(size)
        raise
    return copying


def _release_behind(copying: Pending, room: InflightLimit, size: int, by: Route) -> None:
    issued = on_stream(copying)
    if isinstance(issued, StreamTransfer):
        room.follow(issued, size)
    else:
        by.submit(_Arrive(copying, room, size))


def crosses(src: Location, dst: Location, link: DeviceLink) -> bool:
    """Say whether two locations in memory are on two sides of the link."""
    return src.on_device != dst.on_device and link.topology.host_apart


def _copy(source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
    if after is not None:
        after.wait()
    if source.data_ptr() != into.data_ptr():
        into.copy_(source)
    return Done()


class _Write:
    """Writes what is in host memory once it is there, and holds it until it is written."""

    def __init__(
        self, source: torch.Tensor, write: Callable[[torch.Tensor], Pending], after: Pending | None, room: InflightLimit | None
    ) -> None:
        self._source, self._write, self._after, self._room = source, write, after, room

    def __call__(self) -> None:
        size = self._source.nbytes
        try:
            if self._after is not None:
                self._after.wait()
            self._write(self._source).wait()
        finally:
            del self._source, self._after  # whoever waits for room finds it free
            if self._room is not None:
                self._room.release(size)


class _Arrive:
    """Counts a copied shard as in flight until it has arrived."""

    def __init__(self, copying: Pending, room: InflightLimit, size: int) -> None:
        self._copying, self._room, self._size = copying, room, size

    def __call__(self) -> None:
        try:
            self._copying.wait()
        finally:
            self._room.release(self._size)


class UpdateRoute:
    """The hops of a piece to the side where it is updated, and back. A piece that lives there is updated in place."""

    def __init__(self, link: DeviceLink, *, update_on_device: bool, lane: Callable[[], Lane] | None = None) -> None:
        self.link = link
        self.update_on_device = update_on_device
        self._lane = lane
        """The lane on which pieces copied from the device go on to a drive."""
        self._by = Route(link, self._submit)

    @property
    def device_apart(self) -> bool:
        """Whether pieces are updated in the memory of a device that has its own."""
        return self.update_on_device and self.link.topology.host_apart

    def needs(self, tier: Tier) -> tuple[bool, bool]:
        """Say whether pieces that live on a tier need buffers on the host, and on the device."""
        return self.link.topology.step_buffers(tier, update_on_device=self.update_on_device)

    def bring(self, place: Location, staging: StagingBuffers) -> tuple[torch.Tensor, Pending | None]:
        """Start to bring a piece; return where it will be, and what to wait for."""
        if place.tensor is not None:
            if not crosses(place, self._updated, self.link):
                self.link.wait_read(place.tensor)
                return place.tensor, None
            buffer = staging.device if self.update_on_device else staging.host
            assert buffer is not None
            return buffer, move(place, Location(buffer, on_device=self.update_on_device), by=self._by)
        assert staging.host is not None
        host = on_host(staging.host)
        reading = move(place, host, by=self._by)
        if not self.device_apart:
            return staging.host, reading
        assert staging.device is not None
        return staging.device, move(host, Location(staging.device), by=self._by, after=reading)

    def keep(self, place: Location, piece: torch.Tensor, staging: StagingBuffers) -> Pending | None:
        """Start to bring an updated piece back to its place; wait for the result before its memory changes again."""
        source = Location(piece, on_device=self.update_on_device)
        if place.tensor is not None:
            pending = move(source, place, by=self._by)
            return pending if crosses(source, place, self.link) else None
        if not self.device_apart:
            return move(source, place, by=self._by)
        assert staging.host is not None
        host = on_host(staging.host)
        return move(host, place, by=self._by, after=move(source, host, by=self._by))

    def copy_out(self, piece: torch.Tensor, into: torch.Tensor) -> None:
        """Copy a piece from where it is updated to host memory, and wait for it."""
        move(Location(piece, on_device=self.update_on_device), on_host(into), by=self._by).wait()

    def copy_in(self, source: torch.Tensor, piece: torch.Tensor) -> None:
        """Copy a tensor on either side to a piece where it is updated, and wait for it."""
        on_device = source.device.type != "cpu"
        move(Location(source, on_device=on_device), Location(piece, on_device=self.update_on_device), by=self._by).wait()

    @property
    def _updated(self) -> Location:
        """The side on which pieces are updated."""
        return Location(on_device=self.update_on_device)

    def _submit(self, job: Callable[[], None]) -> Pending:
        assert self._lane is not None, "who keeps pieces says on which lane"
        return self._lane().submit(job)
