"""What crossed each link, and how long compute stood still for it; totals, and those of the last step."""

from __future__ import annotations

import threading
import time
from types import TracebackType

LINKS = ("nvme to host", "host to nvme", "host to device", "device to host", "from ranks", "to ranks")
"""A device that is host memory has no link to it."""


class Meter:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = dict.fromkeys(LINKS, 0)
        self._waited_s: dict[str, float] = dict.fromkeys(LINKS, 0.0)
        self._before: tuple[dict[str, int], dict[str, float]] = (dict(self._bytes), dict(self._waited_s))
        self._last: tuple[dict[str, int], dict[str, float]] = (dict(self._bytes), dict(self._waited_s))
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

    def waited(self, link: str, seconds: float) -> None:
        """Count seconds."""
        with self._lock:
            self._waited_s[link] += seconds

    def waiting(self, link: str) -> Waiting:
        """Context in which compute stands still for a link."""
        return Waiting(self, link)

    def end_step(self) -> None:
        """A step of an optimizer is over."""
        with self._lock:
            now = dict(self._bytes), dict(self._waited_s)
            self._last = (
                {link: count - self._before[0][link] for link, count in now[0].items()},
                {link: seconds - self._before[1][link] for link, seconds in now[1].items()},
            )
            self._before = now
            self.steps += 1
            self._last_s = time.perf_counter() - self._began_s if self._began_s is not None else 0.0
            self._began_s = None

    def last_step(self) -> tuple[int, float]:
        """Return the bytes that the last step wrote to drives, and its seconds, from the first graph on."""
        with self._lock:
            return self._last[0]["host to nvme"], self._last_s

    def report(self) -> dict[str, dict[str, float]]:
        """Return for each link bytes and seconds waited, in total and of the last step."""
        with self._lock:
            return {
                link: {
                    "bytes": self._bytes[link],
                    "bytes_last_step": self._last[0][link],
                    "waited_s": self._waited_s[link],
                    "waited_s_last_step": self._last[1][link],
                }
                for link in LINKS
            }


class Waiting:
    """See `Meter.waiting`."""

    __slots__ = ("_link", "_meter", "_start")

    def __init__(self, meter: Meter, link: str) -> None:
        self._meter, self._link = meter, link
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._meter.waited(self._link, time.perf_counter() - self._start)
