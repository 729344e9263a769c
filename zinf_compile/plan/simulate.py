"""Predicts a step that repeats: seconds on every lane, bytes on every tier at every moment."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from zinf_compile.ir.tiers import Tier

from .occupancy import Interval, intervals, occupied, standing
from .plan import Plan
from .problem import StepProblem
from .unroll import COMPUTE, Task, Unrolled

STEPS = 4
"""Steps that are run: the first ones begin with nothing fetched ahead, the last one is the prediction."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One task on its lane; seconds since the last step began."""

    name: str
    start: float
    end: float
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of many equal ones."""

    seconds: float
    lanes: Mapping[str, tuple[Span, ...]]
    """In order. What the steps before and behind it move as well begins before 0, or ends behind `seconds`."""
    memory: Mapping[Tier, tuple[tuple[float, int], ...]]
    """Bytes from each moment on, as (seconds, bytes)."""
    peak: Mapping[Tier, int]
    waited: Mapping[str, float]
    """Seconds that compute waits for each lane."""

    def busy(self, lane: str) -> float:
        """Return the seconds of a lane's tasks."""
        return math.fsum(span.end - span.start for span in self.lanes.get(lane, ()))


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """When each task ran."""

    start: list[float]
    end: list[float]
    bytes: list[int]
    """What it moved: less than the task says where an update handed some of it over."""
    behind: list[tuple[int, int]]
    """Tasks that were waited for, and by whom, beside those that tasks say."""


def simulate(problem: StepProblem, plan: Plan, *, steps: int = STEPS) -> Timeline:
    """Return the step that a plan comes to when it repeats."""
    unrolled = Unrolled(problem, plan, steps)
    times = run(unrolled.tasks)
    begins = [times.end[number] for number in unrolled.begins]
    zero, seconds = begins[-2], begins[-1] - begins[-2]
    lanes: dict[str, list[Span]] = defaultdict(list)
    for task, start, end, moved in zip(unrolled.tasks, times.start, times.end, times.bytes, strict=True):
        if end > zero and start < begins[-1] and (end > start or moved):
            lanes[task.lane].append(Span(task.name, start - zero, end - zero, moved))
    return Timeline(
        seconds=seconds,
        lanes={lane: tuple(spans) for lane, spans in lanes.items()},
        memory=_memory(problem, plan, unrolled, times, zero, begins[-1]),
        peak={tier: int(total.max()) for tier, total in occupied(problem, plan).items()},
        waited=_waited(unrolled, times),
    )


def step_seconds(problem: StepProblem, plan: Plan, *, steps: int = STEPS) -> float:
    """Return the seconds of `simulate`, and nothing else."""
    unrolled = Unrolled(problem, plan, steps)
    times = run(unrolled.tasks)
    return times.end[unrolled.begins[-1]] - times.end[unrolled.begins[-2]]


def run(tasks: Sequence[Task]) -> Times:
    """Start each task once all that it waits for has ended, and its lane is free, in the order of issue among those.

    Transfers slow each other down as their links say.
    """
    beside = {each.link for task in tasks if task.link is not None and task.seconds for each in task.link.beside}
    waiting = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    issues: dict[int, list[int]] = defaultdict(list)
    for number, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(number)
        if task.handed:
            issues[task.issued].append(number)
    seconds, moved = [task.seconds for task in tasks], [task.bytes for task in tasks]
    behind: list[tuple[int, int]] = []
    start, end = [0.0] * len(tasks), [math.nan] * len(tasks)
    heap: list[tuple[float, int, int]] = []
    running = _Running(tasks, seconds)
    now = 0.0
    lanes: dict[str, list[int]] = {task.lane: [] for task in tasks}
    free = dict.fromkeys(lanes, True)
    touched = dict.fromkeys(lanes)
    for number, count in enumerate(waiting):
        if not count:
            heapq.heappush(lanes[tasks[number].lane], number)
    while touched or heap:
        for lane in touched:
            if not (free[lane] and lanes[lane]):
                continue
            number = heapq.heappop(lanes[lane])
            free[lane] = False
            task = tasks[number]
            start[number] = now
            if task.link is not None and seconds[number] and (task.link.beside or task.link.name in beside):
                for event in running.begin(number, now):
                    heapq.heappush(heap, event)
            else:
                heapq.heappush(heap, (now + seconds[number], number, -1))
        touched = {}
        if not heap:
            break
        now, number, version = heapq.heappop(heap)
        if version >= 0:
            if running.version.get(number) != version:
                continue
            for event in running.finish(number, now):
                heapq.heappush(heap, event)
        end[number] = now
        free[tasks[number].lane] = True
        touched[tasks[number].lane] = None
        for fetch in issues.get(number, ()):
            written, moved[fetch] = _to_move(tasks[fetch], end)
            seconds[fetch] = tasks[fetch].link.seconds(moved[fetch])  # type: ignore[union-attr]
            for write in written:
                behind.append((write, fetch))
                if math.isnan(end[write]):
                    waiting[fetch] += 1
                    followers[write].append(fetch)
        for follower in followers[number]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(lanes[tasks[follower].lane], follower)
                touched[tasks[follower].lane] = None
    stuck = [task.name for task, when in zip(tasks, end, strict=True) if math.isnan(when)]
    assert not stuck, (
        f"{stuck[0]} and {len(stuck) - 1} other tasks wait for each other: the plan is not one that `verify` accepts"
    )
    return Times(start, end, moved, behind)


def _to_move(fetch: Task, end: Sequence[float]) -> tuple[list[int], int]:
    """Return the writes behind which a fetch reads what no update hands to it any more, and the bytes of that."""
    late = [each.written for each in fetch.handed if not math.isnan(end[each.update])]
    handed = math.fsum(each.part for each in fetch.handed if math.isnan(end[each.update]))
    return late, round(fetch.bytes * (1.0 - min(handed, 1.0)))


class _Running:
    """Transfers under way whose rates depend on each other."""

    def __init__(self, tasks: Sequence[Task], seconds: Sequence[float]) -> None:
        self._tasks, self._seconds = tasks, seconds
        self._left: dict[int, tuple[float, float, float]] = {}  # seconds of work left, speed, since when
        self.version: dict[int, int] = {}

    def begin(self, number: int, now: float) -> list[tuple[float, int, int]]:
        self._left[number] = (self._seconds[number], 0.0, now)
        return self._rates(now)

    def finish(self, number: int, now: float) -> list[tuple[float, int, int]]:
        del self._left[number], self.version[number]
        return self._rates(now)

    def _rates(self, now: float) -> list[tuple[float, int, int]]:
        """Set the speed of all transfers, and return when those whose speed is another one now will end."""
        found = []
        names = {self._tasks[number].link.name for number in self._left}  # type: ignore[union-attr]
        for number, (before, speed, since) in self._left.items():
            link = self._tasks[number].link
            assert link is not None
            slowed = [each.bytes_per_second for each in link.beside if each.link in names]
            new = min(slowed) / link.bytes_per_second if slowed else 1.0
            if new == speed:
                continue
            left = max(0.0, before - speed * (now - since))
            self._left[number] = (left, new, now)
            self.version[number] = self.version.get(number, 0) + 1
            found.append((now + left / new, number, self.version[number]))
        return found


def _waited(unrolled: Unrolled, times: Times) -> dict[str, float]:
    """Attribute each pause of compute in the last step to the lane that ended last."""
    found: dict[str, float] = defaultdict(float)
    tasks = unrolled.tasks
    for number in range(unrolled.begins[-2] + 1, unrolled.begins[-1] + 1):  # compute's tasks are numbered in their order
        task = tasks[number]
        if task.lane != COMPUTE:
            continue
        own = [times.end[before] for before in task.after if tasks[before].lane == COMPUTE]
        others = [(times.end[before], tasks[before].lane) for before in task.after if tasks[before].lane != COMPUTE]
        if others and (pause := max(others)[0] - max(own, default=0.0)) > 0:
            found[max(others)[1]] += pause
        assert times.start[number] >= max(own, default=0.0)
    return dict(found)


def _memory(
    problem: StepProblem, plan: Plan, unrolled: Unrolled, times: Times, zero: float, until: float
) -> dict[Tier, tuple[tuple[float, int], ...]]:
    """Return the bytes on each tier over time, from `zero` to `until`."""
    count = problem.count
    last = max(unrolled.issued)
    changes: dict[Tier, dict[float, int]] = {tier: defaultdict(int) for tier in problem.tiers}
    for tier, _, held in standing(problem, plan):
        changes[tier][0.0] += held
    rows = list(intervals(problem, plan))
    rows += [
        Interval(problem.device, "workspace", region.workspace_bytes, number, number + 1)
        for number, region in enumerate(problem.regions)
        if region.workspace_bytes
    ]
    reach = 2 + max((abs(row.start) + abs(row.end) for row in rows), default=0) // count
    for row in rows:
        for step in range(last // count - 1 - reach, last // count + reach):
            begin, end = step * count + row.start, step * count + row.end
            if end <= last - count or begin >= last or (end <= begin and not row.at_step):
                continue
            marks = unrolled.freed if row.at_step else unrolled.issued
            at = times.end[marks[begin]] if begin >= 0 else 0.0
            gone = times.end[unrolled.freed[end]] if end <= last else math.inf
            if gone > zero and at < until:
                changes[row.tier][max(0.0, at - zero)] += row.bytes
                changes[row.tier][max(0.0, gone - zero)] -= row.bytes
    found = {}
    for tier, table in changes.items():
        total, points = 0, []
        for when in sorted(table):
            total += table[when]
            if when <= until - zero:
                points.append((when, total))
        found[tier] = tuple(points)
    return found
