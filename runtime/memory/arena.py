"""An arena of host memory for gathered units.

New memory costs a page fault per 4 KiB, as much time as copying what comes in: so it is used again.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import threading
import weakref

import torch

from zinf_compile.ir.formats import format_of

from .aligned_buffers import private_memory


class GatherMemory:
    """An arena that lends ranges, which come back by themselves when the last tensor on them is dropped.

    The arena is as large as the most that was lent at a time so far, and made anew, larger, at the first moment when nothing is
    lent. What doesn't fit is new memory, kept for nobody. Any thread may call, and drop tensors.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.RLock()  # a tensor may be dropped inside any allocation, also one made under this lock
        self._size = 0
        self._arena: memoryview | None = None
        self._free: list[tuple[int, int]] = []
        """Ranges (start, end) of the arena that are not lent, in order, none next to another."""
        self._leases: dict[int, weakref.ref[memoryview]] = {}
        self._numbers = itertools.count()
        self._lent_bytes = 0
        self._most_lent_bytes = 0

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor, content undefined, whatever mode the caller is in; one of a page or more begins at a page."""
        with torch.inference_mode(False), torch.no_grad():
            return self._lend(numel, dtype)

    def _lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = format_of(dtype).bytes(numel)
        if size < mmap.PAGESIZE and not (self._pinned and size):
            return torch.empty(numel, dtype=dtype)
        view = self.lend_view(size)
        assert view is not None, "there is always new memory"
        return torch.frombuffer(view, dtype=dtype, count=numel)  # holds the view as long as there is a tensor on it

    def reserve(self, size: int) -> None:
        """Make the arena at least so large now, if nothing is lent."""
        with self._lock:
            if not self._lent_bytes and self._size < size:
                self._renew(size)

    def lend_view(self, size: int, *, fresh: bool = True) -> memoryview | None:
        """Return at least so many bytes, which come back when the view is dropped; None where only `fresh` ones are left."""
        length = -(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            most = max(self._most_lent_bytes, self._lent_bytes + length)
            if not self._lent_bytes and self._size < most:
                self._renew(most)
            start = self._take(length)
            if start is None and not fresh:
                return None
            if start is None:
                view = private_memory(length, pinned=self._pinned)
            else:
                assert self._arena is not None
                view = self._arena[start : start + length]
            number = next(self._numbers)
            self._leases[number] = weakref.ref(view, lambda _: self._come_back(number, start, length))
            self._lent_bytes += length
            self._most_lent_bytes = most
        return view

    def held_bytes(self) -> int:
        """Return the bytes of the arena and of what is lent beside it."""
        with self._lock:
            return self._lent_bytes + sum(end - start for start, end in self._free)

    def clear(self) -> None:
        """Let memory go that isn't lent, and forget how much was needed."""
        with self._lock:
            self._most_lent_bytes = self._lent_bytes
            if not self._lent_bytes:
                self._renew(0)

    def _renew(self, size: int) -> None:
        self._size = size
        self._arena = private_memory(size, pinned=self._pinned) if size else None
        self._free = [(0, size)] if size else []

    def _take(self, length: int) -> int | None:
        for i, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[i : i + 1] = [(start + length, end)] if end - start > length else []
                return start
        return None

    def _come_back(self, number: int, start: int | None, length: int) -> None:
        with self._lock:
            del self._leases[number]
            self._lent_bytes -= length
            if start is None:
                return
            end = start + length
            i = bisect.bisect(self._free, (start, end))
            if i < len(self._free) and self._free[i][0] == end:
                end = self._free.pop(i)[1]
            if i and self._free[i - 1][1] == start:
                i -= 1
                start = self._free.pop(i)[0]
            self._free.insert(i, (start, end))
