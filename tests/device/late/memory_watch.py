"""Who has the device's memory at the moment when most of it is held: each block with the Python stack that allocated it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .library import WATCHER, C


class Block(NamedTuple):
    bytes: int
    """As the allocator rounds them."""
    stack: tuple[str, ...]
    """ "file:line function" of each caller, the innermost first."""


class MemoryWatch:
    """Blocks of device memory that were allocated while this watched."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._lock = threading.RLock()  # a free inside of an allocation's record
        self._live: dict[int, Block] = {}
        self._held = 0
        self.peak = 0
        """The most bytes of these held at a time."""
        self._at_peak: dict[int, Block] = {}
        self._stack_at_peak: tuple[str, ...] = ()

    def told(self, address: int, size: int) -> None:
        """Note a block that was allocated or, where the size is negative, freed."""
        stack = _stack(self._depth) if size > 0 else ()
        with self._lock:
            if size > 0:
                self._live[address] = Block(size, stack)
                self._held += size
            elif self._live.pop(address, None) is not None:
                self._held += size
            if self._held > self.peak:
                self.peak, self._at_peak, self._stack_at_peak = self._held, dict(self._live), stack

    def text(self) -> str:
        """Return what was held at the peak, by who had allocated it, the largest first, and who allocated last."""
        found: Counter[tuple[str, ...]] = Counter()
        counts: Counter[tuple[str, ...]] = Counter()
        for block in self._at_peak.values():
            found[block.stack] += block.bytes
            counts[block.stack] += 1
        rows = [f"{size:,} bytes in {counts[stack]}: {' < '.join(stack)}" for stack, size in found.most_common()]
        return "\n".join([f"{self.peak:,} bytes, as {' < '.join(self._stack_at_peak)}", *rows])


@contextmanager
def memory_watch(depth: int = 12) -> Iterator[MemoryWatch]:
    """Watch the allocator inside; blocks that were there before don't count."""
    watch = MemoryWatch(depth)
    callback = WATCHER(watch.told)
    C.late_watch_memory(callback)
    try:
        yield watch
    finally:
        C.late_watch_memory(WATCHER())


def _stack(depth: int) -> tuple[str, ...]:
    found = []
    frame = sys._getframe().f_back
    frame = frame and frame.f_back  # none on a thread of autograd's own, in an operator of PyTorch's
    while frame is not None and len(found) < depth:
        code = frame.f_code
        found.append(f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(found)
