"""Records a training step as it runs, and draws it over its plan: `timeline`; says every so many steps what bounds one:
`report_steps`.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from zinf_compile.backend.planned_step import PlannedStep, planned_step
from zinf_compile.errors import OptionError, ZinfError
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.compared_page import ISSUE, WAITS, Compared, compared_page, lane_rows
from zinf_compile.plan.perfetto import trace_events
from zinf_compile.plan.simulate import Span, Timeline
from zinf_compile.plan.unroll import COMPUTE, UPDATE
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.overlap_log import busy_s
from zinf_compile.runtime.lanes.step_recorder import StepRecord
from zinf_compile.sharded.arguments import plain
from zinf_compile.sharded.ordinary import is_ordinary
from zinf_compile.sharded.parameter import ShardedParameter

if TYPE_CHECKING:
    from zinf_compile.plan.lower_bound import Bound

_log = logging.getLogger("zinf_compile")

FORMATS = ("html", "perfetto")
NEAR = 0.05
"""Part of a step that compute waits for, below which it is compute that bounds the step."""


class Recording:
    """What `timeline` returns: filled when the step that it records is over."""

    def __init__(self, context: Context, title: str, file: Path | None, form: str) -> None:
        self.record: StepRecord | None = None
        """The step as plain values; None until it is over."""
        self.planned: PlannedStep | None = None
        """Problem, plan and predicted timeline of the step; None where its graphs were not planned."""
        self.note = ""
        """Why nothing was planned."""
        self.file = file
        """What is written when the step is over."""
        self._context, self._title, self._form = context, title, form

    @property
    def done(self) -> bool:
        """Whether the step is over."""
        return self.record is not None

    @property
    def measured(self) -> Timeline:
        """The step as it ran, in the form in which plans are simulated."""
        if self.record is None:
            raise OptionError("the step that is recorded is not over: train on, up to the next optimizer.step()")
        return measured_timeline(self.record)

    def bound(self) -> Bound | None:
        """Return seconds that no plan of this step could go below within the caps; None where nothing was planned."""
        if self.planned is None:
            return None
        from zinf_compile.plan.lower_bound import lower_bound  # noqa: PLC0415  (scipy, which `import zinf_compile` can do without)

        return lower_bound(self.planned.problem)

    def at_own_costs(self) -> PlannedStep | None:
        """Return the prediction at what this very step's regions, links and updates took; None where nothing was planned."""
        if self.planned is None or self.record is None:
            return None
        return planned_step([run.program for run in self.record.graphs], memory=self._context.memory, record=self.record)

    def take(self, record: StepRecord) -> None:
        """The step is over."""
        self.record = record
        try:
            self.planned = planned_step([run.program for run in record.graphs], memory=self._context.memory)
        except ZinfError as error:
            self.note = str(error)
        measured = self.measured
        if self.planned is not None:
            rows = lane_rows(measured, self.planned.timeline)
            self._context.lanes.meter.predicted = {
                row.lane: (row.planned_busy or 0.0, row.planned_exposed or 0.0) for row in rows
            }
        if self.file is None:
            return
        try:
            self.file.write_text(self._page(measured) if self._form == "html" else self._events(measured))
        except OSError as error:  # the step is done; training goes on
            _log.error("the timeline of a step can't be written: %s", error)

    def _page(self, measured: Timeline) -> str:
        reservations = self._context.memory.reservations
        caps = {Tier.DEVICE: reservations.device_cap, Tier.HOST: reservations.host_cap}
        try:
            bound = self.bound()
        except ZinfError:
            bound = None
        return compared_page(
            Compared(
                title=self._title,
                measured=measured,
                planned=None if self.planned is None else self.planned.timeline,
                bound=None if bound is None else bound.seconds,
                caps={tier: cap for tier, cap in caps.items() if cap is not None},
                note=self.note,
            )
        )

    def _events(self, measured: Timeline) -> str:
        events: list[dict[str, Any]] = trace_events(measured, name="measured", process=1)
        if self.planned is not None:
            events += trace_events(self.planned.timeline, name="planned", process=2)
        return json.dumps({"traceEvents": events})


def timeline(model: nn.Module, file: str | os.PathLike[str] | None = None, *, form: str | None = None) -> Recording:
    """Record the next training step of a partitioned model, and write it over its plan when it is over.

    The step begins with the first graph that runs behind the last `optimizer.step()`, and ends with the next one's return: where
    this is called between a forward and its `step()`, it is the step after that. Recorded are regions of compute, transfers of
    each link, updates, waits, and the memory of the runtime, for all models that are partitioned over the same ranks.

    `file`: written behind the step; its `form` is "html", one page that needs nothing else, or "perfetto", for ui.perfetto.dev,
    by default that where the name ends in .json. On several ranks each that calls this writes a file: "{rank}" in the name is
    replaced; without it ranks other than the first write beside it, as in step.rank1.html. None: nothing is written. Returns a
    `Recording`, which has the step as values.
    """
    context = _context_of(model, "timeline")
    form = form or ("perfetto" if str(file).endswith(".json") else "html")
    if form not in FORMATS:
        raise OptionError(f"form={form!r} of a timeline is not known; accepted: {', '.join(FORMATS)}")
    if file is not None and (not isinstance(file, str | os.PathLike) or not str(file) or "\0" in str(file)):
        raise OptionError(f"the timeline can't be written to {file!r}; accepted: a file's name, or None")
    path = None if file is None else _file_of(os.fspath(file), context)
    title = f"A step of {type(model).__name__}" + (f" on rank {context.rank} of {context.size}" if context.size > 1 else "")
    recording = Recording(context, title, path, form)
    context.record_next_step().then.append(recording.take)
    return recording


def report_steps(model: nn.Module, *, every: int = 100, write: Callable[[str], object] = print) -> Callable[[], None]:
    """Say in one line, every so many steps, what bounds a step; return a function that ends this.

    The last of these steps is recorded for it, the others are not. Only the first rank writes.
    """
    if not isinstance(every, int) or every < 1:
        raise OptionError(f"every={every!r} is no number of steps; accepted: 1, 2, ...")
    if not callable(write):
        raise OptionError(f"write={write!r} can't be called; accepted: a function of one text, such as print")
    context = _context_of(model, "report_steps")
    meter = context.lanes.meter

    def take(record: StepRecord) -> None:
        if context.rank == 0 and arm in context.step_ended:
            write(step_line(record, meter.steps))

    def arm() -> None:
        if (meter.steps + 1) % every == 0:
            context.record_next_step().then.append(take)

    def stop() -> None:
        if arm in context.step_ended:
            context.step_ended.remove(arm)

    context.step_ended.append(arm)
    arm()
    return stop


def step_line(record: StepRecord, number: int) -> str:
    """Return the line on a step: its seconds, what bounds it, how long each lane was busy."""
    waited: dict[str, float] = defaultdict(float)
    for wait in record.waits:
        waited[wait.lane] += wait.end - wait.start
    by = max(waited, key=waited.__getitem__, default="")
    lanes = dict.fromkeys(span.lane for span in record.spans if span.lane != ISSUE)
    busy = {lane: busy_s([(s.start, s.end) for s in record.of(lane)], 0.0, record.seconds) for lane in lanes}
    exposed = math.fsum(waited.values())
    if exposed < NEAR * record.seconds:
        bound = f"bound by {max((COMPUTE, UPDATE), key=lambda lane: busy.get(lane, 0.0))}"
    else:
        bound = f"bound by {by}, which compute waits {waited[by]:.3g} s for"
    shares = ", ".join(f"{lane} {seconds / record.seconds:.0%}" for lane, seconds in busy.items()) if record.seconds else ""
    return f"step {number}: {record.seconds:.3g} s, {bound}; busy: {shares}"


def measured_timeline(record: StepRecord) -> Timeline:
    """Return a record in the form in which plans are simulated."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in record.spans:
        lanes[span.lane].append(Span(span.name, span.start, span.end, span.bytes))
    waited: dict[str, float] = defaultdict(float)
    for wait in record.waits:
        lanes[WAITS].append(Span(f"waits for {wait.lane}", wait.start, wait.end, 0))
        waited[wait.lane] += min(wait.end, record.seconds) - max(wait.start, 0.0)
    memory = {Tier(side): points for side, points in record.memory.items()}
    return Timeline(
        seconds=record.seconds,
        lanes={lane: tuple(spans) for lane, spans in lanes.items()},
        memory=memory,
        peak={tier: max((count for _, count in points), default=0) for tier, points in memory.items()},
        waited=dict(waited),
    )


def _context_of(model: nn.Module, what: str) -> Context:
    context = next((p._zinf_unit.context for p in plain(model).parameters() if isinstance(p, ShardedParameter)), None)
    if context is None and any(map(is_ordinary, plain(model).parameters())):
        raise OptionError(
            f"{what}: nothing of this {type(model).__name__} moves, and so nothing is recorded: it is on one rank, and all of it "
            'lives on the device. With an option such as device_memory="8GiB" or params="device" there is a plan'
        )
    if context is None:
        raise OptionError(
            f"{what}: no parameter of this {type(model).__name__} is partitioned; call it after the first compiled step"
        )
    return context


def _file_of(name: str, context: Context) -> Path:
    path = Path(name.replace("{rank}", str(context.rank)))
    if context.rank and "{rank}" not in name:
        path = path.with_name(f"{path.stem}.rank{context.rank}{path.suffix}")
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise OptionError(f"the timeline can't be written to {str(path)!r}: {error.strerror}; accepted: a file's name") from error
    return path
