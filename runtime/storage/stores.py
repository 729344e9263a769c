"""The stores of tiers that are not memory: one row for each kind of drive."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.lanes import All, Pending
from zinf_compile.runtime.memory.aligned_buffers import BufferPool

from .engine import Engine
from .extent_store import Store

Extents = Sequence[tuple[Hashable, int]]
"""Names of what is kept, and its bytes."""


class ShardStore(Protocol):
    """Keeps extents by name, moved from and to contiguous host memory. Any thread may call."""

    @property
    def folders(self) -> Sequence[str]:
        """The folders, for messages."""

    @property
    def block_bytes(self) -> int:
        """Bytes that a read of a part begins and ends at multiples of."""

    def read(self, key: Hashable, into: torch.Tensor, *, offset: int = 0) -> Pending:
        """Start to fill `into` with the extent, or with what of it begins at byte `offset`."""

    def write(self, key: Hashable, source: torch.Tensor, *, offset: int = 0) -> Pending:
        """Start to keep `source` as the extent. It may not change until that is over."""

    def close(self) -> None:
        """Let go of everything that is kept."""


def move_together(store: ShardStore, rows: Sequence[tuple[Hashable, torch.Tensor]], *, write: bool) -> Pending:
    """Start to read extents into tensors of their sizes, or to write them; by as few requests as the store knows how to."""
    if isinstance(store, Store):
        return store.write_together(rows) if write else store.read_together(rows)
    return All.begun((store.write if write else store.read)(key, tensor) for key, tensor in rows)


Open = Callable[[Sequence[str], Extents, Engine, BufferPool | None], ShardStore]

STORES: dict[Tier, Open] = {
    Tier.NVME: lambda folders, extents, engine, staging: Store(folders, extents, engine=engine, staging=staging),
}
"""Makers of a tier's store, of (folders, extents, engine, staging)."""


def open_store(
    tier: Tier, folders: Sequence[str], extents: Extents, engine: Engine, staging: BufferPool | None = None
) -> ShardStore:
    """Return a store with space for these extents on a tier."""
    return STORES[tier](folders, extents, engine, staging)
