"""Attributes waiting time to links.

If compute waits for a worker that is itself waiting for the drive, the time counts for the drive. Called by lanes, stores and
whoever waits for them.
"""

from __future__ import annotations

import collections
import threading
import time
from types import TracebackType
from typing import Protocol

MOST_SPANS = 256
"""Waits that are kept of a worker; one wait of compute rarely lasts as long as a few of them."""
JOINED_S = 1e-4
"""Waits for one link that are no further apart count as one."""


class Account(Protocol):
    """Counts the waits of a thread."""

    def waited(self, link: str, start: float, end: float) -> None:
        """Count a wait, from one `time.perf_counter()` to another."""


class _Here(threading.local):
    account: Account | None = None


_here = _Here()


class WorkerWaits:
    """A worker's last waits. `link` is what it is busy with when it doesn't wait; None: with what is no link."""

    def __init__(self, link: str | None) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._spans: collections.deque[tuple[str, float, float]] = collections.deque(maxlen=MOST_SPANS)

    def waited(self, link: str, start: float, end: float) -> None:
        """See `Account.waited`."""
        with self._lock:
            if self._spans and self._spans[-1][0] == link and start - self._spans[-1][2] < JOINED_S:
                start = self._spans.pop()[1]
            self._spans.append((link, start, end))

    def record(self, start: float) -> None:
        """This thread has waited for the worker since `start`: count that for the links it waited for, else for its own."""
        account = _here.account
        if account is None:
            return
        now = time.perf_counter()
        with self._lock:
            meanwhile = [span for span in self._spans if span[2] > start]
        for link, begun, over in meanwhile:
            if self._link is not None and begun > start:
                account.waited(self._link, start, begun)
            account.waited(link, max(start, begun), over)
            start = over
        if self._link is not None and now > start:
            account.waited(self._link, start, now)


def work_for(waits: WorkerWaits) -> None:
    """Count this thread's waits as those of a worker from now on."""
    _here.account = waits


def worker() -> WorkerWaits | None:
    """Return the waits of the worker that this thread is, if it is one."""
    return _here.account if isinstance(_here.account, WorkerWaits) else None


def record_wait(link: str, start: float) -> None:
    """This thread has waited for a link since `start`."""
    if _here.account is not None:
        _here.account.waited(link, start, time.perf_counter())


class attribute_waits:
    """Context in which this thread's waits count for an account; those of a worker stay its own."""

    __slots__ = ("_account", "_before")

    def __init__(self, account: Account) -> None:
        self._account = account
        self._before: Account | None = None

    def __enter__(self) -> None:
        self._before = _here.account
        if not isinstance(self._before, WorkerWaits):
            _here.account = self._account

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _here.account = self._before
