"""The critical path of a planned step, in seconds: the chain of tasks, each waiting for the one before, that sets its length."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import networkx as nx

from .plan import Plan
from .problem import StepProblem
from .simulate import STEPS, run
from .unroll import Unrolled


@dataclasses.dataclass(frozen=True, slots=True)
class PathTask:
    """A task on the path, and how long it takes of the step."""

    name: str
    lane: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class CriticalPath:
    """The path through one step of many equal ones, first task to last."""

    tasks: tuple[PathTask, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds of all its tasks: those of the step."""
        return math.fsum(task.seconds for task in self.tasks)

    def by_lane(self) -> dict[str, float]:
        """Return its seconds on each lane, the longest first."""
        found: dict[str, float] = defaultdict(float)
        for task in self.tasks:
            found[task.lane] += task.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def text(self) -> str:
        """Return one line: the seconds by lane."""
        lanes = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in self.by_lane().items() if seconds)
        return f"critical path {self.seconds:.3g} s: {lanes}"


def critical_path(problem: StepProblem, plan: Plan, *, steps: int = STEPS) -> CriticalPath:
    """Return the longest path of the tasks that `simulate` runs, through its last step.

    Its graph has an edge from each task to who waits for it, and to the next one on its lane; tasks last as long as they ran.
    """
    unrolled = Unrolled(problem, plan, steps)
    times = run(unrolled.tasks)
    graph: nx.DiGraph = unrolled.graph()
    graph.add_edges_from(times.behind)
    lanes: dict[str, list[int]] = defaultdict(list)
    for number, task in enumerate(unrolled.tasks):
        lanes[task.lane].append(number)
    for numbers in lanes.values():
        nx.add_path(graph, sorted(numbers, key=lambda n: (times.start[n], times.end[n], n)))
    begin, end = unrolled.begins[-2:]
    reached: dict[int, float] = {}
    before: dict[int, int | None] = {}
    for number in nx.topological_sort(graph):
        before[number] = max(graph.predecessors(number), key=reached.__getitem__, default=None)
        earlier = before[number]
        reached[number] = times.end[number] - times.start[number] + (0.0 if earlier is None else reached[earlier])
    path: list[PathTask] = []
    zero = times.end[begin]
    found: int | None = end
    while found is not None and times.end[found] > zero:
        seconds = times.end[found] - max(times.start[found], zero)
        if seconds > 0:
            path.append(PathTask(unrolled.tasks[found].name, unrolled.tasks[found].lane, seconds))
        found = before[found]
    return CriticalPath(tuple(reversed(path)))
