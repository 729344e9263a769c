"""One hop of a shard between two tiers, and the hops of a piece between where it lives and where it is updated.

Called by units, the optimizer's chunks and the loading of values; knows tensors and places, no unit and no schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.device.link import DeviceLink
from zinf_compile.runtime.lanes.lanes import All, Done, Lane, Pending
from zinf_compile.runtime.lanes.stream_lane import StreamTransfer, on_stream
from zinf_compile.runtime.memory.inflight import InflightLimit

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context


class Shards(Protocol):
    """Shards on a drive that are moved together: small ones by one request."""

    def move_together(self, rows: Sequence[tuple[int, torch.Tensor, int]], *, write: bool) -> Pending:
        """Start to read ranges of shards, or to write them: each a shard's number, host memory, and its first element."""


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a shard, or a piece of one, is: in memory (`tensor`), or on a drive, read to and written from host memory."""

    tensor: torch.Tensor | None = None
    on_device: bool = True
    read: Callable[[torch.Tensor], Pending] | None = None
    write: Callable[[torch.Tensor], Pending] | None = None
    among: tuple[Shards, int, int] | None = None
    """The shards on a drive among which it is, its number there and its first element: where it may be moved with others."""


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
            return by.submit(_Write([(dst, source)], [] if after is None else [after], by, room))
        assert dst.tensor is not None, "a location is memory, or can be written"
        copying = (by.link.to_device if dst.on_device else by.link.to_host)(source, dst.tensor, after)
        if room is not None:
            _release_behind(copying, room, size, by)
    except BaseException:  # an interrupt while the lane is busy
        if room is not None:
            room.release(size)
        raise
    return copying


def move_together(rows: Sequence[tuple[Location, torch.Tensor]], *, by: Route, write: bool) -> list[Pending]:
    """Start hops between drives and host memory; return what to wait for, for each of `rows`.

    What is `among` the same shards is moved together. What is written is there; what is read comes after copies from its memory.
    """
    groups: dict[Shards | None, list[int]] = {}
    for number, (place, _) in enumerate(rows):
        groups.setdefault(None if place.among is None else place.among[0], []).append(number)
    found: dict[int, Pending] = {}
    try:
        for shards, numbers in groups.items():
            if shards is None or len(numbers) == 1:
                for number in numbers:
                    place, memory = rows[number]
                    ends = (on_host(memory), place) if write else (place, on_host(memory))
                    found[number] = move(*ends, by=by)
                continue
            if not write:
                by.link.wait_read(*(rows[number][1] for number in numbers))
            ranges = [(place.among[1], memory, place.among[2]) for place, memory in map(rows.__getitem__, numbers) if place.among]
            found.update(dict.fromkeys(numbers, shards.move_together(ranges, write=write)))
    except BaseException:  # nobody else would wait for what has begun
        with contextlib.suppress(Exception):
            All(list(found.values())).wait()
        raise
    return [found[number] for number in range(len(rows))]


def write_together(
    rows: Sequence[tuple[Location, torch.Tensor]], *, by: Route, after: Sequence[Pending], room: InflightLimit
) -> Pending:
    """Start to write what is in host memory once all of `after` is over; see `move`, and `move_together`."""
    size = sum(memory.nbytes for _, memory in rows)
    room.acquire(size)
    try:
        return by.submit(_Write(rows, after, by, room))
    except BaseException:  # an interrupt while the lane is busy
        room.release(size)
        raise


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
    """Writes what is in host memory once all of it is there, and holds it until it is written."""

    def __init__(
        self,
        rows: Sequence[tuple[Location, torch.Tensor]],
        after: Sequence[Pending],
        by: Route,
        room: InflightLimit | None = None,
    ) -> None:
        self._rows, self._after, self._by, self._room = rows, after, by, room

    def __call__(self) -> None:
        size = sum(memory.nbytes for _, memory in self._rows)
        try:
            All(self._after).wait()
            All(list(dict.fromkeys(move_together(self._rows, by=self._by, write=True)))).wait()
        finally:
            self._rows, self._after = (), ()  # whoever waits for room finds it free
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

    def bring(self, rows: Sequence[tuple[Location, StagingBuffers]], under_way: list[Pending]) -> list[torch.Tensor]:
        """Start to bring pieces; return where each will be. What to wait for is added to `under_way`.

        Those in the memory of the other side come by one copy, and those that one request reads from a drive go on by one.
        """
        away = [number for number, (place, _) in enumerate(rows) if place.tensor is None]
        reads = [(rows[number][0], there(rows[number][1].host)) for number in away]
        reading = dict(zip(away, move_together(reads, by=self._by, write=False), strict=True))
        under_way += dict.fromkeys(reading.values())
        found, at_hand = list[torch.Tensor](), list[torch.Tensor]()
        copies: dict[Pending | None, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """By what they come after: source and destination of each."""
        for number, (place, staging) in enumerate(rows):
            source = there(staging.host) if place.tensor is None else place.tensor
            if self.device_apart if place.tensor is None else crosses(place, self._updated, self.link):
                found.append(there(staging.device if self.update_on_device else staging.host))
                copies.setdefault(reading.get(number), []).append((source, found[-1]))
            else:
                found.append(source)
                at_hand += [] if place.tensor is None else [source]
        if at_hand:
            self.link.wait_read(*at_hand)
        for before, group in copies.items():
            under_way.append(self._copy(group, [] if before is None else [before], to_device=self.update_on_device))
        return found

    def keep(
        self, rows: Sequence[tuple[Location, torch.Tensor, StagingBuffers]], under_way: list[Pending]
    ) -> list[Pending | None]:
        """Start to bring updated pieces back to their places; what to wait for before their memory changes is in `under_way`.

        Return for each the transfer to memory on the other side, if it is one. All of those are one copy, and so are those that
        go on to a drive.
        """
        writes, to_drives = list[tuple[Location, torch.Tensor]](), list[tuple[torch.Tensor, torch.Tensor]]()
        crossing: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for number, (place, piece, staging) in enumerate(rows):
            source = Location(piece, on_device=self.update_on_device)
            if place.tensor is not None:
                if crosses(source, place, self.link):
                    crossing[number] = (piece, place.tensor)
                else:
                    move(source, place, by=self._by)
            elif self.device_apart:
                writes.append((place, there(staging.host)))
                to_drives.append((piece, writes[-1][1]))
            else:
                writes.append((place, piece))
        found: dict[int, Pending] = {}
        if crossing:
            under_way.append(self._copy(list(crossing.values()), [], to_device=not self.update_on_device))
            found = dict.fromkeys(crossing, under_way[-1])
        if to_drives:
            copying = self._copy(to_drives, [], to_device=False)
            under_way += [copying, self._submit(_Write(writes, [copying], self._by))]
        else:
            under_way += dict.fromkeys(move_together(writes, by=self._by, write=True))
        return [found.get(number) for number in range(len(rows))]

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Pending], *, to_device: bool) -> Pending:
        """Start to copy several pieces over the link, as one."""
        copy = self.link.to_device_together if to_device else self.link.to_host_together
        return copy([source for source, _ in pairs], [into for _, into in pairs], after)

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


def there(buffer: torch.Tensor | None) -> torch.Tensor:
    """Return the memory that what passes through one side has there."""
    assert buffer is not None, "what passes has room"
    return buffer
