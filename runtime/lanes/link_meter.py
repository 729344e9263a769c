"""Bytes, peaks and waiting time of each link, in total and of the last step.

`stats()` reads them; links, stores and collectives count here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from .lanes import All, Pending
from .overlap_log import Spans, busy_s
from .step_recorder import StepRecord, StepRecorder
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
        self.on_streams = False
        """Whether transfers run on streams of an accelerator: of these, only a recorder knows the times."""
        self.recorder: StepRecorder | None = None
        """Notes the step under way, or the next one."""
        self._next_recorder: StepRecorder | None = None
        self._busy = {link: Spans() for link in LINKS}
        self._busy_s: dict[str, float] = dict.fromkeys(LINKS, 0.0)
        self._busy_last_s = dict(self._busy_s)
        self._steps_s = 0.0
        self.predicted: dict[str, tuple[float, float]] = {}
        """Busy and exposed seconds of a step by link, as a plan predicts them."""

    def begin(self) -> None:
        """A graph runs; the first time since the last step, that is where the next one begins."""
        if self._began_s is None:
            with self._lock:
                self._began_s = time.perf_counter()
                if not self.steps:
                    self._before = dict(self._bytes), dict(self._waited_s)
                if self.recorder is not None:
                    self.recorder.begin(self._began_s)

    def record_next(self, make: Callable[[], StepRecorder]) -> StepRecorder:
        """Return what notes the next step that begins; made by `make` where there is none yet."""
        with self._lock:
            if self._began_s is None:
                self.recorder = self.recorder or make()
                return self.recorder
            self._next_recorder = self._next_recorder or make()
            return self._next_recorder

    def moved(self, link: str, count: int) -> None:
        """Count bytes."""
        with self._lock:
            self._bytes[link] += count

    def follow(self, link: str, count: int, transfer: Pending, what: str = "") -> Pending:
        """Count the bytes of a transfer that was begun; return it. They are under way until somebody knows that it is over."""
        self.moved(link, count)
        return _Followed(self, link, count, transfer, what)

    def busy(self, link: str, start: float, end: float, count: int = 0, what: str = "") -> None:
        """Note that a link was busy from one time to another, with so many bytes."""
        self._busy[link].append((start, end))
        if self.recorder is not None:
            self.recorder.add(link, what or link, start, end, count)

    def waited(self, link: str, start: float, end: float) -> None:
        """Count the seconds between two times."""
        with self._lock:
            self._waited_s[link] += end - start
        if self.recorder is not None:
            self.recorder.waited(link, start, end)

    def waiting(self) -> attribute_waits:
        """Context in which compute stands still for whatever it waits for; each wait counts for its link."""
        return attribute_waits(self)

    def end_step(self) -> StepRecorder | None:
        """A step of an optimizer is over; return what has noted it."""
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
            over = time.perf_counter()
            began = over if self._began_s is None else self._began_s
            self._last_s = over - began
            self._steps_s += self._last_s
            busy, self._busy = self._busy, {link: Spans() for link in LINKS}
            self._busy_last_s = {link: busy_s(list(spans), began, over) for link, spans in busy.items()}
            for link, seconds in self._busy_last_s.items():
                self._busy_s[link] += seconds
            self._began_s = None
            ended = self.recorder
            if ended is not None and not ended.began:  # a step without a graph
                return None
            self.recorder, self._next_recorder = self._next_recorder, None
            if ended is not None:
                ended.end(over)
            return ended

    def recorded(self, record: StepRecord) -> None:
        """Count what only the record of the last step knows: times on streams."""
        if not self.on_streams:
            return
        with self._lock:
            for link in LINKS[2:]:
                seconds = busy_s([(span.start, span.end) for span in record.of(link)], 0.0, record.seconds)
                stalled = sum(wait.end - wait.start for wait in record.waits if wait.lane == link)
                self._busy_last_s[link], self._last[1][link] = seconds, stalled
                self._busy_s[link] += seconds
                self._waited_s[link] += stalled
                self._before[1][link] += stalled

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
                    "busy_s": self._busy_s[link],
                    "busy_s_last_step": self._busy_last_s[link],
                    "idle_s": max(0.0, self._steps_s - self._busy_s[link]),
                    "idle_s_last_step": max(0.0, self._last_s - self._busy_last_s[link]),
                    "exposed_s": self._waited_s[link],
                    "exposed_s_last_step": self._last[1][link],
                    **dict(zip(("predicted_busy_s", "predicted_exposed_s"), self.predicted.get(link, ()), strict=False)),
                }
                for link in LINKS
            }

    def _set_out(self, link: str, count: int) -> None:
        with self._lock:
            now = self._under_way[link] = self._under_way[link] + count
            self._peak[link] = max(self._peak[link], now)


@contextlib.contextmanager
def under_way(meters: Sequence[Meter], link: str, count: int) -> Iterator[None]:
    """Context in which bytes are under way."""
    for meter in meters:
        meter._set_out(link, count)
    try:
        yield
    finally:
        for meter in meters:
            meter._set_out(link, -count)


@contextlib.contextmanager
def moving(meters: Sequence[Meter], link: str, count: int, what: str = "") -> Iterator[None]:
    """Context in which bytes are under way, and the link is busy with them."""
    with under_way(meters, link, count), timing(meters, link, count, what):
        yield


@contextlib.contextmanager
def timing(meters: Sequence[Meter], link: str, count: int, what: str = "") -> Iterator[None]:
    """Context in which a link is busy: by the clock, or on an accelerator, where there is a recorder, by the current stream."""
    with contextlib.ExitStack() as stack:
        for meter in meters:
            if meter.on_streams and meter.recorder is not None:
                stack.enter_context(meter.recorder.timed(link, what or link, count))
        start = time.perf_counter()
        try:
            yield
        finally:
            for meter in meters:
                if not meter.on_streams:
                    meter.busy(link, start, time.perf_counter(), count, what)


class _Followed:
    """See `Meter.follow`."""

    __slots__ = ("__weakref__", "_count", "_link", "_meter", "_start", "_transfer", "_what")

    def __init__(self, meter: Meter, link: str, count: int, transfer: Pending, what: str) -> None:
        self._meter, self._link, self._count, self._transfer, self._what = meter, link, count, transfer, what
        self._start = time.perf_counter()
        meter._set_out(link, count)
        if meter.recorder is not None:
            meter.recorder.follow(self)

    def wait(self) -> None:
        try:
            self._transfer.wait()
        finally:
            self._arrive()

    def _arrive(self) -> None:
        with self._meter._lock:
            count, self._count = self._count, 0
            self._meter._set_out(self._link, -count)
        if count and (times := self._times()) is not None:
            self._meter.busy(self._link, *times, count, self._what)

    def _times(self) -> tuple[float, float] | None:
        """Return when the drive was busy with it; where it doesn't say, from the begin to now."""
        parts = self._transfer.parts if isinstance(self._transfer, All) else [self._transfer]
        known = [getattr(part, "times", (self._start, time.perf_counter())) for part in parts]
        if not known or None in known:
            return None
        return min(start for start, _ in known), max(end for _, end in known)

    __del__ = _arrive  # nobody will ever wait for it
