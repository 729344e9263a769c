"""Plans made again for a forward and its backward as one, so that units may stay from one to the other. `replan` calls it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise

from zinf_compile.errors import ZinfError
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.analysis.step_problem import problem_of_runs, unit_members
from zinf_compile.plan.acted import Part, acted_plan
from zinf_compile.plan.both_graphs import halves, joined
from zinf_compile.plan.planners import just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.plan.verify import check
from zinf_compile.runtime.lanes.step_recorder import StepRecord

from .kept_graphs import KeptGraph, Then

CODE_BETWEEN = 4
"""Times the bytes of a forward's results for which the caller's code has room before the backward, as for a loss of them."""

_log = logging.getLogger("zinf_compile")

Members = Mapping[str, Sequence[ParameterSlot]]


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Graphs that may be planned otherwise, with the seconds of the plans that they have and of those that they may have."""

    graphs: Sequence[KeptGraph]
    then: Sequence[Then | None]
    """Of each graph; None: it keeps its plan."""
    before: float
    after: float

    @property
    def name(self) -> str:
        """The graphs in words."""
        return " and ".join(kept.name for kept in self.graphs)

    @property
    def rows(self) -> int:
        """Rows of the plans that differ."""
        rows = zip(self.graphs, self.then, strict=True)
        return sum(len(kept.plan.diff(then.plan)) for kept, then in rows if then is not None)


def pairs_of(graphs: Sequence[KeptGraph], records: Sequence[StepRecord]) -> list[tuple[KeptGraph, ...]]:
    """Return the graphs, each forward with its backward where no other graph ran in between in the recorded steps."""
    by_name = {kept.name: kept for kept in graphs}
    runs = [[run.program for run in record.graphs] for record in records]
    found: list[tuple[KeptGraph, ...]] = []
    paired: set[str] = set()
    for kept in graphs:
        behind = by_name.get(f"backward of graph {kept.number}")
        if kept.name.startswith("forward") and behind is not None and _follow(runs, kept.name, behind.name):
            found.append((kept, behind))
            paired |= {kept.name, behind.name}
    return [*found, *((kept,) for kept in graphs if kept.name not in paired)]


def _follow(runs: Sequence[Sequence[str]], forward: str, backward: str) -> bool:
    """Say whether each run of the backward came right behind one of the forward, and there was one."""
    before = {one for names in runs for one, other in pairwise(("", *names)) if other == backward}
    return before == {forward}


class Pair:
    """A forward and its backward."""

    def __init__(self, forward: KeptGraph, backward: KeptGraph, problems: Sequence[StepProblem]) -> None:
        self._graphs, self._problems = (forward, backward), problems
        pair = forward.gm.graph, backward.gm.graph
        planner = forward.planner
        both = problem_of_runs([pair], [(0, False), (0, True)], planner.facts())
        self._members: Members = unit_members(list(pair), planner.home)
        self._unit_of = {slot.name: name for name, slots in self._members.items() for slot in slots if name in both.unit}
        self._count = problems[0].count
        self.problem = joined(both, *problems, between=CODE_BETWEEN * forward.results)

    def change(self) -> Change:
        """Return the fastest plans: those that both have, new ones for each by itself, or one for both."""
        now = [Then(problem, kept.plan, kept.members, kept.handed) for kept, problem in self._rows()]
        before = self._seconds(now)
        best: tuple[float, list[Then]] | None = None
        for made in (self._alone, self._as_one):
            try:
                then = made()
                seconds = self._seconds(then)
            except Exception as error:  # a planner's own, too: training can go on
                level = logging.DEBUG if isinstance(error, ZinfError) else logging.WARNING
                _log.log(level, "the %s and its backward aren't planned again: %s", self._graphs[0].name, error)
                continue
            if best is None or seconds < best[0]:
                best = seconds, then
        if best is None or best[0] >= before:
            return Change(self._graphs, [None, None], before, before)
        return Change(self._graphs, best[1], before, best[0])

    def _rows(self) -> list[tuple[KeptGraph, StepProblem]]:
        return list(zip(self._graphs, self._problems, strict=True))

    def _alone(self) -> list[Then]:
        found = []
        for kept, problem in self._rows():
            plan = kept.planner.made_for(problem)
            check(problem, plan)
            found.append(Then(problem, plan, kept.members))
        return found

    def _as_one(self) -> list[Then]:
        plan = self._graphs[0].planner.made_for(self.problem)
        check(self.problem, plan)
        found = []
        for half in halves(self.problem, plan, self._count):
            check(half.with_held, half.plan)
            members = {name: self._members[name] for name in half.problem.unit}
            found.append(Then(half.problem, half.plan, members, half.handed))
        return found

    def _seconds(self, then: Sequence[Then]) -> float:
        """Return the simulated seconds of both graphs."""
        parts = []
        for each, first, finds in zip(then, (0, self._count), (frozenset[str](), then[1].handed), strict=True):
            units = {
                name: tuple(dict.fromkeys(self._unit_of[slot.name] for slot in slots if slot.name in self._unit_of))
                for name, slots in each.members.items()
            }
            parts.append(Part(each.plan, first, units, finds))
        homes = just_in_time(self.problem).local.homes
        return step_seconds(self.problem, acted_plan(self.problem, parts, homes))


def change_of(kept: KeptGraph, problem: StepProblem) -> Change:
    """Return the fastest plan of a graph by itself: its own, or a new one."""
    before = after = step_seconds(problem, kept.plan)
    then: Then | None = None
    try:
        plan = kept.planner.made_for(problem)
        check(problem, plan)
        after = step_seconds(problem, plan)
        then = Then(problem, plan, kept.members)
    except Exception as error:  # a planner's own, too: the other ranks wait, and training can go on
        _log.warning("the %s keeps its plan: %s", kept.name, error)
    return Change((kept,), (then,), before, after) if after < before else Change((kept,), (None,), before, before)
