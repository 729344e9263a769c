"""Limits of what transfers under way may hold.

`InflightLimit` is for transfers that give room back from their worker; `InflightQueue` for those that one caller starts and waits
for, in order.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

from zinf_compile.runtime.lanes.lanes import Pending, wait_for_all
from zinf_compile.runtime.lanes.stream_lane import StreamTransfer, on_stream
from zinf_compile.runtime.lanes.wait_times import WorkerWaits, worker


class InflightLimit:
    """Admits transfers while what they hold stays within a limit; one alone is always admitted."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._held = 0
        self._lock = threading.RLock()  # entered directly: Ctrl-C may leave a condition locked
        self._changed = threading.Condition(self._lock)
        self._left: WorkerWaits | None = None
        """The last worker that gave room back."""
        self._followed: collections.deque[tuple[StreamTransfer, int]] = collections.deque()
        """Transfers on streams that hold some of it."""

    def acquire(self, count: int) -> None:
        """Wait until there is room for `count` bytes, and take it."""
        with self._lock:
            self._wait_for(lambda: not self._lacks(count))
            self._held += count

    def drain(self, enough: Callable[[], bool]) -> None:
        """Wait until there is `enough` memory, as transfers in flight end, or until none is left."""
        with self._lock:
            self._wait_for(lambda: not self._held or enough())

    @property
    def held(self) -> int:
        """The bytes that transfers under way hold now."""
        with self._lock:
            self._wait_for(lambda: True)  # of those on streams that are over by now
            return self._held

    def follow(self, transfer: StreamTransfer, count: int) -> None:
        """Have room given back when a transfer on a stream is over. Who needs it before orders its own stream after that."""
        with self._lock:
            self._followed.append((transfer, count))

    def release(self, count: int) -> None:
        """Give room back."""
        with self._lock:
            self._held = max(0, self._held - count)  # an interrupt may make it be given back twice
            self._left = worker() or self._left
            self._changed.notify_all()

    def _wait_for(self, over: Callable[[], bool]) -> None:
        while self._followed and (self._followed[0][0].is_over() or not over()):
            transfer, count = self._followed.popleft()
            self._held = max(0, self._held - count)
            transfer.wait()
        if not over():
            start = time.perf_counter()
            self._changed.wait_for(over)
            if self._left is not None:
                self._left.record(start)

    def _lacks(self, count: int) -> bool:
        return self.limit is not None and bool(self._held) and self._held + count > self.limit


class InflightQueue:
    """Admits transfers while what they hold stays within a limit, in any unit; one alone is always admitted.

    Room is made by waiting for the oldest. Not for several threads.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._under_way: collections.deque[tuple[Pending, int]] = collections.deque()

    def make_room(self, count: int) -> None:
        """Wait for the oldest transfers until `count` more are within the limit; raise what one of them raised."""
        while self._under_way and self._held + count > self.limit:
            pending, held = self._under_way.popleft()
            self._held -= held
            on_stream(pending).wait()

    def add(self, pending: Pending, count: int) -> None:
        """Count a transfer that was started after `make_room`."""
        self._under_way.append((pending, count))
        self._held += count

    def drain(self) -> None:
        """Return when all are over; raise the first error, after all have ended."""
        under_way = list(self._under_way)
        self.abandon()
        wait_for_all(pending.wait for pending, _ in under_way)

    def abandon(self) -> None:
        """Count nothing any more: what is under way ends by itself."""
        self._under_way.clear()
        self._held = 0
