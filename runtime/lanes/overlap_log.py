"""The part of the time of transfers during which compute went on, from logs that lanes and waits keep."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol

import torch

Span = tuple[float, float]
"""Start and end, in seconds of `time.perf_counter`."""

MOST_SPANS = 100_000
"""Spans that one log keeps; older ones are dropped."""


class Spans(collections.deque[Span]):
    """A bounded log of spans; any thread may append."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        super().__init__(spans, maxlen=MOST_SPANS)


class Timed:
    """Context that notes when it was entered and left."""

    __slots__ = ("_spans", "_start")

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._spans.append((self._start, time.perf_counter()))


def timed(transfer: Callable[[], None], spans: Spans) -> Callable[[], None]:
    """Return `transfer` noting its time."""

    def run() -> None:
        with Timed(spans):
            transfer()

    return run


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """The logs of one rank."""

    gathers: Spans = dataclasses.field(default_factory=Spans)
    reductions: Spans = dataclasses.field(default_factory=Spans)
    waits: Spans = dataclasses.field(default_factory=Spans)
    """Times when compute stood still: for a transfer, for a full lane, for another rank."""

    def transfer_s(self) -> float:
        """Return the seconds that transfers took, those of the two lanes added up; they wait for other ranks, too."""
        return sum(end - start for start, end in (*self.gathers, *self.reductions))

    def overlapped_s(self) -> float:
        """Return those of them during which compute wasn't waiting."""
        return overlapped_s((*self.gathers, *self.reductions), self.waits)


class Recorded(Protocol):
    """A `Context`, as far as its lanes and waits are logged."""

    device: torch.device
    lanes: Any


@contextlib.contextmanager
def recorded(context: Recorded) -> Iterator[Log]:
    """Context in which a rank's lanes and waits are noted; off it, nothing is and nothing is spent.

        with recorded(context) as log:
            step()
        print(log.overlapped_s() / log.transfer_s())

    For lanes on the CPU; on a device, where they are streams, a profiler shows the same.
    """
    if context.device.type != "cpu":
        raise ValueError(f"transfers of {context.device} run on streams and are not logged; use torch.profiler there")
    log = Log()
    lanes = context.lanes
    lanes.gather.log, lanes.reduce.log, lanes.waits = log.gathers, log.reductions, log.waits
    try:
        yield log
    finally:
        lanes.gather.log = lanes.reduce.log = lanes.waits = None


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that overlap as one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def busy_s(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return the seconds between two times in which one of the spans is, or several."""
    return sum(max(0.0, min(over, end) - max(start, begin)) for start, over in joined(spans))


def overlapped_s(transfers: Iterable[Span], waits: Iterable[Span]) -> float:
    """Return the seconds of `transfers`, added up, that lie in none of the `waits`."""
    still = joined(waits)
    ends = [end for _, end in still]
    total = 0.0
    for start, end in transfers:
        total += end - start
        for position in range(bisect.bisect_right(ends, start), len(still)):
            wait_start, wait_end = still[position]
            if wait_start >= end:
                break
            total -= min(end, wait_end) - max(start, wait_start)
    return total
