"""Space on drives for saved values: an extent for each, from the forward to the end of its backward."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Sequence

import torch

from zinf_compile.errors import StoreError
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.memory.aligned_buffers import BufferPool

from .engine import Engine
from .stores import ShardStore, open_store


class _Row:
    """Extents that were reserved together, in one store."""

    def __init__(self, store: ShardStore, sizes: Sequence[int]) -> None:
        self.store = store
        self.bytes = sum(sizes)
        self.taken = 0
        weakref.finalize(self, store.close).atexit = False  # at exit the kernel frees the files


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """Space for one memory."""

    row: _Row
    key: str
    bytes: int

    def read(self, into: torch.Tensor) -> Pending:
        """Start to read it into host memory of its size; what is wrong with it raises at the wait."""
        return self.row.store.read(self.key, into)

    def write(self, source: torch.Tensor) -> Pending:
        """Start to write it; the source may not change until that is over."""
        return self.row.store.write(self.key, source)


class ValueSpace:
    """Extents by size. As much is reserved as was in use at a time, rows of one forward together; any thread may call."""

    def __init__(self, tier: Tier, folders: Sequence[str], engine: Engine, staging: BufferPool) -> None:
        self.tier, self.folders = tier, tuple(folders)
        self._engine, self._staging = engine, staging
        self._lock = threading.RLock()  # a value may be dropped inside any allocation
        self._free: dict[int, list[Extent]] = {}
        self._rows: list[_Row] = []
        self._numbers = itertools.count()
        self.bytes = 0
        """In use."""
        self.peak_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Space on the drives, in use or not."""
        with self._lock:
            return sum(row.bytes for row in self._rows)

    def reserve(self, sizes: Sequence[int]) -> None:
        """See that extents of these sizes are free; raise `StoreError` where the drives have no room for those missing."""
        with self._lock:
            missing = Counter(sizes) - Counter({size: len(free) for size, free in self._free.items()})
            if missing:
                self._add(list(missing.elements()))

    def take(self, size: int) -> Extent:
        """Return an extent for so many bytes; it is given back by `give_back`."""
        with self._lock:
            self.reserve([size])
            extent = self._free[size].pop()
            extent.row.taken += 1
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
            return extent

    def give_back(self, extent: Extent) -> None:
        """Let the space be used again. What is still read or written there comes first."""
        with self._lock:
            extent.row.taken -= 1
            self.bytes -= extent.bytes
            self._free.setdefault(extent.bytes, []).append(extent)

    def _add(self, sizes: list[int]) -> None:
        """Reserve a row of extents; rows that nobody uses go first where space is short, or more is idle than was ever in use."""
        total = sum(sizes)
        if self.reserved_bytes + total > 2 * max(self.peak_bytes, self.bytes + total):
            self._drop_idle()
        keys = [f"saved value {next(self._numbers)}" for _ in sizes]
        try:
            store = self._open(keys, sizes)
        except StoreError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._drop_idle()
            try:
                store = self._open(keys, sizes)
            except StoreError as again:
                raise _no_room(again, total, self.bytes) from again
        row = _Row(store, sizes)
        self._rows.append(row)
        for key, size in zip(keys, sizes, strict=True):
            self._free.setdefault(size, []).append(Extent(row, key, size))

    def _open(self, keys: Sequence[str], sizes: Sequence[int]) -> ShardStore:
        return open_store(self.tier, self.folders, list(zip(keys, sizes, strict=True)), self._engine, self._staging)

    def _drop_idle(self) -> None:
        idle = [row for row in self._rows if not row.taken]
        self._rows = [row for row in self._rows if row.taken]
        self._free = {size: [e for e in free if e.row not in idle] for size, free in self._free.items()}
        for row in idle:
            row.store.close()


def _no_room(error: StoreError, needed: int, used: int) -> StoreError:
    return StoreError(
        error.errno,
        f"saved values of a forward need {needed:,} bytes more on {error.filename!r}, beside {used:,} of forwards whose backward "
        f"hasn't run: {error.strerror}. Fewer micro-batches between forward and backward, or activations='keep', need less",
        error.filename,
    )
