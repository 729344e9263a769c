"""Between where a piece of a state lives and where it is updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from zinf_compile.ir.tiers import step_buffers
from zinf_compile.runtime.device.link import Bridge
from zinf_compile.runtime.lanes.lanes import Lane, Pending


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a piece of a state lives between two steps: in memory (`tensor`), or on a drive."""

    tensor: torch.Tensor | None = None
    on_device: bool = True
    read: Callable[[torch.Tensor], Pending] | None = None
    write: Callable[[torch.Tensor], Pending] | None = None


@dataclasses.dataclass(frozen=True)
class Rooms:
    """Memory for a piece on its way; None on a side where none of its kind ever needs any."""

    host: torch.Tensor | None
    device: torch.Tensor | None


class Mover:
    """Brings pieces to where they are updated, on the host or on the device, and back; what is there already stays in place."""

    def __init__(self, bridge: Bridge, *, update_on_device: bool, lane: Callable[[], Lane] | None = None) -> None:
        self.bridge = bridge
        self.update_on_device = update_on_device
        self._lane = lane
        """On which what was copied from the device goes on to a drive."""

    def needs(self, tier: str) -> tuple[bool, bool]:
        """Say whether pieces that live on a tier need room on the host, and on the device."""
        return step_buffers(tier, unified=self.bridge.unified, update_on_device=self.update_on_device)

    def bring(self, place: Place, rooms: Rooms) -> tuple[torch.Tensor, Pending | None]:
        """Start to bring a piece; return where it will be, and what to wait for."""
        if place.tensor is not None:
            if self.bridge.unified or place.on_device == self.update_on_device:
                return place.tensor, None
            if self.update_on_device:
                assert rooms.device is not None
                return rooms.device, self.bridge.to_device(place.tensor, rooms.device, None)
            assert rooms.host is not None
            return rooms.host, self.bridge.to_host(place.tensor, rooms.host, None)
        assert place.read is not None
        assert rooms.host is not None
        reading = place.read(rooms.host)
        if self.bridge.unified or not self.update_on_device:
            return rooms.host, reading
        assert rooms.device is not None
        return rooms.device, self.bridge.to_device(rooms.host, rooms.device, reading)

    def keep(self, place: Place, piece: torch.Tensor, rooms: Rooms) -> Pending | None:
        """Start to bring an updated piece back to its place; return what to wait for before its memory changes again."""
        if place.tensor is not None:
            if piece.data_ptr() == place.tensor.data_ptr():
                return None
            if self.bridge.unified or place.on_device == self.update_on_device:
                place.tensor.copy_(piece)
                return None
            back = self.bridge.to_host if self.update_on_device else self.bridge.to_device
            return back(piece, place.tensor, None)
        assert place.write is not None
        if self.bridge.unified or not self.update_on_device:
            return place.write(piece)
        assert rooms.host is not None
        assert self._lane is not None, "who keeps pieces says on which lane"
        return self._lane().submit(_Onward(self.bridge.to_host(piece, rooms.host, None), place.write, rooms.host))


@dataclasses.dataclass(frozen=True)
class _Onward:
    """Writes what is in host memory once it is there."""

    before: Pending
    write: Callable[[torch.Tensor], Pending]
    source: torch.Tensor

    def __call__(self) -> None:
        self.before.wait()
        self.write(self.source).wait()
