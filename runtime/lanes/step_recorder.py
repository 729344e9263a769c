"""Records one step as it runs: compute, transfers, updates and waits, each with its begin and end, and memory over time.

Made by `Meter.record_next`. The executor, links, drives and the optimizer's step note here what they do, where there is a
recorder; without one nothing is noted. On an accelerator, times of what runs on streams are those of events.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Protocol

import torch

from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Region, Step, Wait

from .lanes import Pending

COMPUTE: Final = "compute"
UPDATE: Final = "update"
ISSUE: Final = "issue"
"""What the host does between regions of compute: starting transfers, casting what has arrived."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """One thing that took time; seconds since the step began."""

    lane: str
    """`compute`, `update`, `issue`, or a link's name."""
    name: str
    start: float
    end: float
    bytes: int = 0
    run: int = -1
    """The number of the graph's run in the step, of compute and what is issued beside it."""
    region: int = -1
    """The number of the region in its graph."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphRun:
    """One execution of a graph."""

    program: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a step did, as plain values."""

    seconds: float
    """From its first graph to the end of the optimizer's `step()`."""
    spans: tuple[Recorded, ...]
    """Whatever overlaps with the step, in order of begin: what an earlier step deferred to it, too."""
    waits: tuple[Recorded, ...]
    """Times when compute stood still; the lane is the link that it waited for."""
    graphs: tuple[GraphRun, ...]
    memory: Mapping[str, tuple[tuple[float, int], ...]]
    """Bytes by side, from each moment on."""

    def of(self, lane: str) -> list[Recorded]:
        """Return the spans of one lane."""
        return [span for span in self.spans if span.lane == lane]


class Watched(Protocol):
    """An account of memory, which tells of each change."""

    watch: Callable[[int], None] | None

    def total(self) -> tuple[int, int]:
        """Return the bytes held now, and the most at any time."""


class StepRecorder:
    """Any thread may note something. It begins with a step's first graph and ends with the optimizer's step."""

    def __init__(self, device: torch.device, accounts: Mapping[str, Watched]) -> None:
        self.then: list[Callable[[StepRecord], None]] = []
        """Called with the record, once it is whole."""
        self.on_streams = device.type != "cpu"
        self._device, self._accounts = device, accounts
        self._spans: list[tuple[str, str, float, float, int, int, int]] = []
        self._events: list[tuple[str, str, torch.Event, torch.Event, int, int, int]] = []
        self._waits: list[tuple[str, float, float]] = []
        self._stalls: list[tuple[str, torch.Event, torch.Event]] = []
        self._open: set[_Open] = set()
        self._under_way: list[weakref.ref[Pending]] = []
        self._memory: dict[str, list[tuple[float, int]]] = {side: [] for side in accounts}
        self._graphs: list[list[Any]] = []
        self._lock = threading.Lock()
        self._began: float | None = None
        self._over = 0.0
        self._base: torch.Event | None = None

    @property
    def began(self) -> bool:
        """Whether its step has begun."""
        return self._began is not None

    def begin(self, now: float) -> None:
        """The step's first graph is about to run."""
        if self.on_streams:
            torch.accelerator.synchronize(self._device)
            self._base = self._event()
            now = time.perf_counter()
        self._began = now
        for side, account in self._accounts.items():
            self._memory[side].append((now, account.total()[0]))
            account.watch = lambda count, points=self._memory[side]: points.append((time.perf_counter(), count))

    def end(self, now: float) -> None:
        """The step is over."""
        for account in self._accounts.values():
            account.watch = None
        if self.on_streams:
            torch.accelerator.synchronize(self._device)
            now = time.perf_counter()
        self._over = now
        with self._lock:
            for each in self._open:  # what goes on beyond the step
                self._spans.append((*each.what[:2], each.start, now, *each.what[2:]))
            self._open.clear()

    def add(self, lane: str, name: str, start: float, end: float, count: int = 0) -> None:
        """Note what took from one `time.perf_counter()` to another."""
        self._spans.append((lane, name, start, end, count, -1, -1))

    def waited(self, link: str, start: float, end: float) -> None:
        """Note that compute has waited for a link."""
        self._waits.append((link, start, end))

    def follow(self, transfer: Pending) -> None:
        """Keep in mind a transfer that says by itself when it is over, to whoever waits for it."""
        self._under_way.append(weakref.ref(transfer))

    def timed(
        self, lane: str, name: str, count: int = 0, *, run: int = -1, region: int = -1, on_stream: bool = True
    ) -> contextlib.AbstractContextManager[object]:
        """Return a context whose time is noted: on an accelerator that of the current stream, unless it is the host's."""
        if self.on_streams and on_stream:
            return self._timed_by_events(lane, name, count, run, region)
        return _Open(self, (lane, name, count, run, region))

    def graph(self, program: Program) -> GraphRecorder:
        """Begin to note what one execution of a graph does."""
        with self._lock:
            self._graphs.append([program.name, time.perf_counter(), None])
            return GraphRecorder(self, program, len(self._graphs) - 1)

    def graph_over(self, run: int) -> None:
        """An execution of a graph is over."""
        self._graphs[run][2] = time.perf_counter()

    def finish(self) -> StepRecord:
        """Return the record; wait for drives that are still busy with what the step has begun."""
        for reference in self._under_way:
            transfer = reference()
            if transfer is not None:
                with contextlib.suppress(Exception):  # raised, too, to those that it is due to
                    transfer.wait()
        assert self._began is not None, "a step begins before it ends"
        zero, seconds = self._began, self._over - self._began
        spans = [Recorded(lane, name, a - zero, b - zero, *rest) for lane, name, a, b, *rest in list(self._spans)]
        waits = [Recorded(link, link, a - zero, b - zero) for link, a, b in list(self._waits)]
        for lane, name, first, last, *rest in self._events:
            spans.append(Recorded(lane, name, *self._span_of(first, last), *rest))
        waits += [Recorded(link, link, *self._span_of(first, last)) for link, first, last in self._stalls]
        end = self._over
        return StepRecord(
            seconds=seconds,
            spans=_within(spans, seconds),
            waits=_within(waits, seconds),
            graphs=tuple(
                GraphRun(name, start - zero, (end if over is None else over) - zero) for name, start, over in self._graphs
            ),
            memory={side: tuple((max(0.0, when - zero), n) for when, n in points) for side, points in self._memory.items()},
        )

    @contextlib.contextmanager
    def stalled(self, link: str) -> Iterator[None]:
        """Context in which a stream may come to stand still for a link."""
        first = self._event()
        try:
            yield
        finally:
            self._stalls.append((link, first, self._event()))

    @contextlib.contextmanager
    def _timed_by_events(self, lane: str, name: str, count: int, run: int, region: int) -> Iterator[None]:
        first = self._event()
        try:
            yield
        finally:
            self._events.append((lane, name, first, self._event(), count, run, region))

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _span_of(self, first: torch.Event, last: torch.Event) -> tuple[float, float]:
        assert self._base is not None
        last.synchronize()
        return self._base.elapsed_time(first) / 1e3, self._base.elapsed_time(last) / 1e3

    def opened(self, each: _Open) -> None:
        """Something has begun."""
        with self._lock:
            self._open.add(each)

    def closed(self, each: _Open, end: float) -> None:
        """It is over; where the step was over before, that is noted."""
        with self._lock:
            if each in self._open:
                self._open.remove(each)
                self._spans.append((*each.what[:2], each.start, end, *each.what[2:]))


class _Open:
    """See `StepRecorder.timed`, on the host."""

    __slots__ = ("_recorder", "start", "what")

    def __init__(self, recorder: StepRecorder, what: tuple[str, str, int, int, int]) -> None:
        self._recorder, self.what = recorder, what
        self.start = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()
        self._recorder.opened(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._recorder.closed(self, time.perf_counter())


class GraphRecorder:
    """Notes one execution of a graph."""

    __slots__ = ("_link", "_name", "_recorder", "_region", "_run")

    def __init__(self, recorder: StepRecorder, program: Program, run: int) -> None:
        self._recorder, self._name, self._run = recorder, program.name, run
        self._region = 0
        self._link = "from ranks" if program.sequence else "host to device"

    def compute(self, step: Region, values: list[Any]) -> Sequence[Any]:
        """Run a region."""
        self._region = max(0, step.number)
        with self._recorder.timed(COMPUTE, f"{self._name}: {step.name or step.number}", run=self._run, region=self._region):
            return step.fn(values)

    def perform(self, perform: Callable[[Any, Any], None], step: Step, run: Any) -> None:
        """Perform a step that is no region."""
        recorder = self._recorder
        if not recorder.on_streams:
            with recorder.timed(ISSUE, type(step).__name__, run=self._run, region=self._region):
                perform(step, run)
        elif isinstance(step, Wait):
            with recorder.stalled(self._link):
                perform(step, run)
        else:
            perform(step, run)

    def over(self) -> None:
        """It is over."""
        self._recorder.graph_over(self._run)


def _within(spans: Sequence[Recorded], seconds: float) -> tuple[Recorded, ...]:
    return tuple(sorted((s for s in spans if s.end > 0 and s.start < seconds), key=lambda s: (s.start, s.end)))
