"""The backings of shards that are off their device.

Each says where a range of the shard is, as a `Location` for `transfer.move`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.transfer.move import Location, on_host

from .nvme_shards import NvmeShards


class ShardBacking(Protocol):
    """Host memory or a drive."""

    tier: Tier

    @property
    def resident(self) -> torch.Tensor | None:
        """The shard itself, where it is in host memory."""

    def location(self, start: int, end: int) -> Location:
        """Return where the elements [start, end) are, which begin and end where pieces do: for `transfer.move`."""


class HostBacking:
    """Host memory beside a device with memory of its own."""

    tier = Tier.HOST

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard

    @property
    def resident(self) -> torch.Tensor | None:
        """See `ShardBacking.resident`."""
        return self._shard

    def location(self, start: int, end: int) -> Location:
        """See `ShardBacking.location`."""
        return on_host(self._shard[start:end])


class NvmeBacking:
    """A shard among the `NvmeShards` of a row of units."""

    resident: torch.Tensor | None = None

    def __init__(self, shards: NvmeShards, index: int) -> None:
        self.shards = shards
        self._index = index
        self.tier = shards.tier

    def location(self, start: int, end: int) -> Location:
        """See `ShardBacking.location`."""
        return Location(
            read=lambda into: self.read(into, start),
            write=lambda source: self.write(source, start),
            among=self.among(start),
        )

    def among(self, start: int) -> tuple[NvmeShards, int, int]:
        """See `Location.among`, for what begins at element `start`."""
        return self.shards, self._index, start

    def read(self, into: torch.Tensor, start: int = 0) -> Pending:
        """Start to fill `into` with the shard, or with the pieces of it that begin at element `start`."""
        return self.shards.read(self._index, into, start)

    def write(self, source: torch.Tensor, start: int = 0) -> Pending:
        """Start to keep `source` as the shard, or as the pieces of it that begin at element `start`."""
        return self.shards.write(self._index, source, start)

    def blocks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the blocks, in elements, that hold the elements [start, end): each can be read by itself."""
        return self.shards.blocks(self._index, start, end)

    def block(self, start: int) -> Location:
        """Return where the block is that begins at element `start`."""
        return Location(read=lambda into: self.shards.read_block(self._index, start, into))
