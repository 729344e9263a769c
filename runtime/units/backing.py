"""Where a shard lives that isn't on its device."""

from __future__ import annotations

from typing import Protocol

import torch

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.lanes import Done, Pending

from .nvme_shards import NvmeShards


class ShardBacking(Protocol):
    """Host memory or a drive; moves shards to and from host memory."""

    tier: Tier

    @property
    def resident(self) -> torch.Tensor | None:
        """The shard itself, where it is in host memory."""

    def read(self, into: torch.Tensor, start: int = 0) -> Pending:
        """Start to fill `into` with the shard, or with a tile's, which begins at element `start`."""

    def write(self, source: torch.Tensor, start: int = 0) -> Pending:
        """Start to keep `source` as the shard, or as a tile's."""


class HostBacking:
    """Host memory beside a device with memory of its own."""

    tier = Tier.HOST

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard

    @property
    def resident(self) -> torch.Tensor | None:
        """See `ShardBacking.resident`."""
        return self._shard

    def read(self, into: torch.Tensor, start: int = 0) -> Pending:
        """See `ShardBacking.read`."""
        into.copy_(self._shard[start : start + into.numel()])
        return Done()

    def write(self, source: torch.Tensor, start: int = 0) -> Pending:
        """See `ShardBacking.write`."""
        place = self._shard[start : start + source.numel()]
        if source.data_ptr() != place.data_ptr():
            place.copy_(source)
        return Done()


class NvmeBacking:
    """A shard among the `NvmeShards` of a row of units."""

    resident: torch.Tensor | None = None

    def __init__(self, shards: NvmeShards, index: int) -> None:
        self.shards = shards
        self._index = index
        self.tier = shards.tier

    def read(self, into: torch.Tensor, start: int = 0) -> Pending:
        """See `ShardBacking.read`."""
        return self.shards.read(self._index, into, start)

    def write(self, source: torch.Tensor, start: int = 0) -> Pending:
        """See `ShardBacking.write`."""
        return self.shards.write(self._index, source, start)

    def read_piece(self, start: int, into: torch.Tensor) -> Pending:
        """Start to fill `into` with the piece that begins at element `start`."""
        return self.shards.read_piece(self._index, start, into)

    def blocks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the blocks, in elements, that hold the elements [start, end): each can be read by itself."""
        return self.shards.blocks(self._index, start, end)

    def read_block(self, start: int, into: torch.Tensor) -> Pending:
        """Start to fill `into` with the block that begins at element `start`."""
        return self.shards.read_block(self._index, start, into)

    def write_piece(self, start: int, source: torch.Tensor) -> Pending:
        """Start to keep `source` as the piece that begins at element `start`."""
        return self.shards.write_piece(self._index, start, source)
