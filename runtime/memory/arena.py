"""An arena of host memory for gathered units.

New memory costs a page fault per 4 KiB, as much time as copying what comes in: so it is used again.
"""

from __future__ import annotations

import collections
import itertools
import mmap
import threading
import weakref

import torch

from zinf_compile.ir.formats import format_of

from .aligned_buffers import private_memory
from .ranges import FreeRanges


def _unmarked(_one: None, _other: None) -> None:
    """Join ranges without marks."""


class GatherMemory:
    """An arena that lends ranges, which come back by themselves when the last tensor on them is dropped.

    The arena is as large as the most that was lent at a time so far, and made anew, larger, at the first moment when nothing is
    lent. What doesn't fit is new memory, kept for nobody. Any thread may call, and drop tensors.

    Where memory is `pinned`, all of it is: an accelerator's copies of other memory keep the host waiting. What doesn't fit is
    then kept for loans of that size until the arena is made anew, as far as no more is held than was lent at a time.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()  # not entered again: a tensor dropped inside waits in `_returned`
        self._returned: collections.deque[tuple[int, int | None, int]] = collections.deque()
        """Leases that came back: number, start and length."""
        self._beside: dict[int, memoryview] = {}
        """Pinned memory beside the arena that is lent, by the number of its lease."""
        self._spare: list[memoryview] = []
        """The same that came back."""
        self._size = 0
        self._arena: memoryview | None = None
        self._free: FreeRanges[None] = FreeRanges(0, None, _unmarked)
        """Ranges of the arena that are not lent."""
        self._leases: dict[int, weakref.ref[memoryview]] = {}
        self._numbers = itertools.count()
        self._let_go = False
        self._lent_bytes = 0
        self._most_lent_bytes = 0

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor, content undefined, whatever mode the caller is in; one of a page or more begins at a page."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._lend(numel, dtype)
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
            self._take_back()
            if not self._lent_bytes and self._size < size:
                self._renew(size)

    def lend_view(self, size: int, *, fresh: bool = True) -> memoryview | None:
        """Return at least so many bytes, which come back when the view is dropped; None where only `fresh` ones are left."""
        length = -(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._take_back()
            most = max(self._most_lent_bytes, self._lent_bytes + length)
            if not self._lent_bytes and self._size < most:
                self._renew(most)
            found = self._free.take(length)
            if found is None and not fresh:
                return None
            start = None if found is None else found[0]
            number = next(self._numbers)
            if start is not None:
                assert self._arena is not None
                view = self._arena[start : start + length]
            elif self._pinned:
                view = self._beside_arena(number, length, most)
            else:
                view = private_memory(length)
            self._leases[number] = weakref.ref(view, lambda _: self._come_back(number, start, length))
            self._lent_bytes += length
            self._most_lent_bytes = most
        return view

    def held_bytes(self) -> int:
        """Return the bytes of the arena and of what is lent beside it."""
        with self._lock:
            self._take_back()
            return self._lent_bytes + self._free.free_bytes() + sum(map(len, self._spare))

    def clear(self) -> None:
        """Let memory go that isn't lent, and forget how much was needed."""
        self._let_go = True
        self._try_taking_back()

    def _beside_arena(self, number: int, length: int, most: int) -> memoryview:
        fitting = next((i for i, spare in enumerate(self._spare) if len(spare) == length), None)
        if fitting is None:
            self._drop_spare(most - length)
            memory = private_memory(length, pinned=True)
        else:
            memory = self._spare.pop(fitting)
        self._beside[number] = memory
        return memory[:]  # a view of its own, which is dropped when nobody uses it

    def _renew(self, size: int) -> None:
        self._spare.clear()
        self._size = size
        self._arena = private_memory(size, pinned=self._pinned) if size else None
        self._free = FreeRanges(size, None, _unmarked)

    def _come_back(self, number: int, start: int | None, length: int) -> None:
        """Note, on any thread and inside of anything, that nothing uses what was lent."""
        self._returned.append((number, start, length))
        self._try_taking_back()

    def _try_taking_back(self) -> None:
        if self._lock.acquire(blocking=False):  # else whoever has it, perhaps this thread, does it later
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._returned:
            number, start, length = self._returned.popleft()
            del self._leases[number]
            self._lent_bytes -= length
            if start is not None:
                self._free.give(start, length, None)
            elif self._pinned:
                self._spare.append(self._beside.pop(number))
                self._drop_spare(self._most_lent_bytes)
        if self._let_go:
            self._let_go, self._most_lent_bytes = False, self._lent_bytes
            if not self._lent_bytes:
                self._renew(0)

    def _drop_spare(self, most: int) -> None:
        """Let memory beside the arena go, the oldest first, so that no more than `most` is held, as far as that helps."""
        held = self._lent_bytes + self._free.free_bytes() + sum(map(len, self._spare))
        while self._spare and held > most:
            held -= len(self._spare.pop(0))
