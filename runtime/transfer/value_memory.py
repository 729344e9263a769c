"""The memory of saved values on its way from the device and back, hop by hop. Called by `swap_values`; knows no schedule."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from zinf_compile.ir.tiers import Tier
from zinf_compile.ir.value_spans import ValueForm
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.storage.value_space import Extent, ValueSpace

from .move import Location, on_host


class ValueMemory:
    """A stretch of memory that values share, off the device: in host memory, or in an extent on a drive."""

    def __init__(self, device: torch.device, span: tuple[int, int]) -> None:
        self.device = device
        self.span = span
        """First and last byte of the storage that it was in."""
        self.tier = Tier.DEVICE
        self.arriving: Pending = Done()
        """The last hop to where it lives."""
        self._host: torch.Tensor | None = None
        self._extent: Extent | None = None

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.span[1] - self.span[0]

    @property
    def host(self) -> torch.Tensor:
        """It, in host memory."""
        assert self._host is not None, "it comes to host memory first"
        return self._host

    def put_on_host(self, host: torch.Tensor) -> Location:
        """Let it live in this host memory, which is filled afterwards."""
        self._host, self.tier = host, Tier.HOST
        return on_host(host)

    def put_on_drive(self, space: ValueSpace) -> Location:
        """Let it live on drives, which are written to afterwards; the space is given back with this object."""
        extent = space.take(self.bytes)
        weakref.finalize(self, space.give_back, extent).atexit = False
        self._extent, self.tier = extent, space.tier
        return self.location()

    def leave_host(self) -> None:
        """Let host memory go that it was in before it was on a drive."""
        self._host = None

    def location(self) -> Location:
        """Return where it lives, for `transfer.move`."""
        if self._extent is not None:
            return Location(read=self._extent.read, write=self._extent.write)
        return on_host(self.host)


def bytes_of(tensor: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """Return a stretch of a tensor's storage as bytes."""
    start, end = span
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (end - start,), (1,))


def form_of(tensor: torch.Tensor) -> ValueForm:
    """Return where a tensor lies in its storage."""
    return ValueForm(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.element_size())


def by_storage(values: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the positions of values that share a storage, each in one list: compiled compute may give a view its own."""
    found: dict[int, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value.untyped_storage().data_ptr(), []).append(position)
    return list(found.values())
