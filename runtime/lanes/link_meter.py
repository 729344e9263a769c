"""Bytes, peaks and waiting time of each link, in total and of the last step.

`stats()` reads them; links, stores and collectives count here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from .lanes import Pending
from .wait_times import attribute_waits

READ: Final = "nvme to host"
WRITTEN: Final = "host to nvme"
LINKS = (READ, WRITTEN, "host to device", "device to host", "from ranks", "to ranks")
"""A device that is host memory has no link to it."""


class Meter:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a transfer may be dropped inside any allocation
        self._bytes: dict[str, int] = dict.fromkeys(LINKS, 0)
        self._waited_s: dict[str, float] = dict.fromkeys(LINKS, 0.0)
        self._before: tuple[dict[str, int], dict[str, float]] = (dict(self._bytes), dict(self._waited_s))
        self._last: tuple[dict[str, int], dict[str, float]] = (dict(self._bytes), dict(self._waited_s))
        self._under_way: dict[str, int] = dict.fromkeys(LINKS, 0)
        self._peak: dict[str, int] = dict.fromkeys(LINKS, 0)
        """Peaks of the step under way."""
        self._peak_before: dict[str, int] = dict.fromkeys(LINKS, 0)
        self._peak_last: dict[str, int] = dict.fromkeys(LINKS, 0)
        self.steps = 0
        self._began_s: float | None = None
        self._last_s = 0.0

    def begin(self) -> None:
        """A graph runs; the first time since the last step, that is where the next one begins."""
        if self._began_s is None:
            with self._lock:
                self._began_s = time.perf_counter()
                if not self.steps:
                    self._before = dict(self._bytes), dict(self._waited_s)

    def moved(self, link: str, count: int) -> None:
        """Count bytes."""
        with self._lock:
            self._bytes[link] += count

    def follow(self, link: str, count: int, transfer: Pending) -> Pending:
        """Count the bytes of a transfer that was begun; return it. They are under way until somebody knows that it is over."""
        self.moved(link, count)
        return _Followed(self, link, count, transfer)

    def waited(self, link: str, start: float, end: float) -> None:
        """Count the seconds between two times."""
        with self._lock:
            self._waited_s[link] += end - start

    def waiting(self) -> attribute_waits:
        """Context in which compute stands still for whatever it waits for; each wait counts for its link."""
        return attribute_waits(self)

    def end_step(self) -> None:
        """A step of an optimizer is over."""
        with self._lock:
            now = dict(self._bytes), dict(self._waited_s)
            self._last = (
                {link: count - self._before[0][link] for link, count in now[0].items()},
                {link: seconds - self._before[1][link] for link, seconds in now[1].items()},
            )
            self._before = now
            self._peak_before = {link: max(peak, self._peak[link]) for link, peak in self._peak_before.items()}
            self._peak_last, self._peak = self._peak, dict(self._under_way)
            self.steps += 1
            self._last_s = time.perf_counter() - self._began_s if self._began_s is not None else 0.0
            self._began_s = None

    def last_step(self) -> tuple[int, float]:
        """Return the bytes that the last step wrote to drives, and its seconds, from the first graph on."""
        with self._lock:
            return self._last[0][WRITTEN], self._last_s

    def report(self) -> dict[str, dict[str, float]]:
        """Return for each link bytes, the most under way at a time, and seconds waited: in total and of the last step."""
        with self._lock:
            return {
                link: {
                    "bytes": self._bytes[link],
                    "bytes_last_step": self._last[0][link],
                    "peak_bytes": max(self._peak_before[link], self._peak[link]),
                    "peak_bytes_last_step": self._peak_last[link],
                    "waited_s": self._waited_s[link],
                    "waited_s_last_step": self._last[1][link],
                }
                for link in LINKS
            }

    def _set_out(self, link: str, count: int) -> None:
        with self._lock:
            now = self._under_way[link] = self._under_way[link] + count
            self._peak[link] = max(self._peak[link], now)


@contextlib.contextmanager
def moving(meters: Sequence[Meter], link: str, count: int) -> Iterator[None]:
    """Context in which bytes are under way."""
    for meter in meters:
        meter._set_out(link, count)
    try:
        yield
    finally:
        for meter in meters:
            meter._set_out(link, -count)


class _Followed:
    """See `Meter.follow`."""

    __slots__ = ("_count", "_link", "_meter", "_transfer")

    def __init__(self, meter: Meter, link: str, count: int, transfer: Pending) -> None:
        self._meter, self._link, self._count, self._transfer = meter, link, count, transfer
        meter._set_out(link, count)

    def wait(self) -> None:
        try:
            self._transfer.wait()
        finally:
            self._arrive()

    def _arrive(self) -> None:
        with self._meter._lock:
            count, self._count = self._count, 0
            self._meter._set_out(self._link, -count)

    __del__ = _arrive  # nobody will ever wait for it
