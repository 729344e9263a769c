"""Plans made again for a forward and its backward as one, so that units may stay from one to the other. `replan` calls it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import fx

from zinf_compile.errors import PlanError, ZinfError
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import copied
from zinf_compile.passes.analysis.saved_values import moved_values
from zinf_compile.passes.analysis.step_problem import problem_of_runs, saved_values, unit_members
from zinf_compile.passes.graph.node_facts import leaving, mark_moving
from zinf_compile.plan.acted import Part, acted_plan
from zinf_compile.plan.both_graphs import CODE_BETWEEN, away_in_between, halves, joined, retimed, with_held, with_saved
from zinf_compile.plan.plan import Plan
from zinf_compile.plan.planners import just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.plan.verify import check
from zinf_compile.runtime.lanes.step_recorder import StepRecord

from .kept_graphs import KeptGraph, Then

ROUNDS = 3
"""Plans for both, each for the memory that saved values take with the one before, until one fits."""

_log = logging.getLogger("zinf_compile")

Members = Mapping[str, Sequence[ParameterSlot]]
Moving = Mapping[str, SavedMemory]
"""What leaves between forward and backward, by the names of the values."""


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


def pair_change(pair: Sequence[KeptGraph], problems: Sequence[StepProblem]) -> Change | None:
    """Return the fastest plans of a forward and its backward; None where each is planned by itself."""
    forward, backward = pair
    if not forward.planner.plans_pairs:
        return None
    try:
        return _Pair(forward, backward, problems).change()
    except Exception as error:  # training can go on
        _log.warning("the %s and its backward are planned one by one: %s", forward.name, error)
        return None


class _Pair:
    """A forward and its backward."""

    def __init__(self, forward: KeptGraph, backward: KeptGraph, problems: Sequence[StepProblem]) -> None:
        self._graphs, self._problems = (forward, backward), problems
        pair = forward.gm.graph, backward.gm.graph
        planner = forward.planner
        both = problem_of_runs([pair], [(0, False), (0, True)], planner.facts())
        self._members: Members = unit_members(list(pair), planner.home)
        self._unit_of = {slot.name: name for name, slots in self._members.items() for slot in slots if name in both.unit}
        self._count = problems[0].count
        self._between = CODE_BETWEEN * forward.results
        self._joined = joined(both, *problems, between=self._between)
        self._homes = just_in_time(self._joined.with_budgets(**dict.fromkeys(both.tiers))).local.homes
        self._moving = moved_values(forward.gm, both.regions[0].graph)
        self._held = self._held_by([kept.gm for kept in self._graphs]) if self._moving else []
        self.problem = self._with_saved(pair)

    def change(self) -> Change:
        """Return the fastest plans: those that both have, new ones for each by itself, or one for both."""
        now = [Then(problem, kept.plan, kept.members, kept.handed) for kept, problem in self._rows()]
        before = self._seconds(now, self._moving)
        best: tuple[float, list[Then]] | None = None
        for made in (self._alone, self._as_one, *([self._with_saved_moved] if self.problem.saved else [])):
            try:
                then, moving = made()
                seconds = self._seconds(then, moving)
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

    def _held_by(self, graphs: Sequence[fx.GraphModule]) -> list[int]:
        """Return the bytes of compute in each region of both; nothing where they aren't known."""
        forward = self._graphs[0]
        if forward.compute is None or not forward.planner.topology.host_apart:
            return []
        found = forward.compute.held([gm.graph for gm in graphs], forward.own_outputs)
        return [count for own in found for count in own]

    def _with_saved(self, pair: tuple[fx.Graph, fx.Graph]) -> StepProblem:
        """Return the problem in which a plan says when saved values move: those in host memory that is apart."""
        each = len(self._moving) == len(leaving(self._graphs[0].gm))  # has a name of its own
        if not self._held or not each or any(memory.tier != Tier.HOST for memory in self._moving.values()):
            return self._joined
        values = list(away_in_between((value for value in saved_values(pair) if value.name in self._moving), self._count))
        values = [dataclasses.replace(value, choices=(str(Tier.HOST),)) for value in values]
        plain = dataclasses.replace(self._joined, saved=tuple(values))
        return with_saved(self._joined, values, acted_plan(plain, (), self._homes, saved=self._moving))

    def _alone(self) -> tuple[list[Then], Moving]:
        found = []
        for kept, problem in self._rows():
            plan = kept.planner.made_for(problem)
            check(problem, plan)
            found.append(Then(problem, plan, kept.members))
        return found, self._moving

    def _as_one(self) -> tuple[list[Then], Moving]:
        """Return one plan as those of both, in which saved values move as they do."""
        plan = self._graphs[0].planner.made_for(self._joined)
        check(self._joined, plan)
        return self._halves(self._joined, plan, (None, None)), self._moving

    def _with_saved_moved(self) -> tuple[list[Then], Moving]:
        """Return one plan of both that says when saved values move; made again where they then take other memory than it has."""
        problem = self.problem
        for _ in range(ROUNDS):
            plan = self._graphs[0].planner.made_for(problem)
            check(problem, plan)
            forward, backward = (copied(kept.gm) for kept in self._graphs)
            moving = retimed(self._moving, plan, problem.device)
            mark_moving(forward, backward, tuple(moving.values()))
            now = self._held_by([forward, backward])
            whole = with_held(self._joined, [after - before for after, before in zip(now, self._held, strict=True)])
            try:
                return self._halves(whole, plan, (forward, backward)), moving
            except PlanError as error:
                refusal = error
            problem = with_saved(whole, problem.saved, acted_plan(problem, (), self._homes, saved=moving))
        raise refusal

    def _halves(self, whole: StepProblem, plan: Plan, graphs: Sequence[fx.GraphModule | None]) -> list[Then]:
        """Return what both graphs become; raise `PlanError` where there is no room for it."""
        found = []
        for half, gm in zip(halves(whole, plan, self._count, between=self._between), graphs, strict=True):
            check(half.with_held, half.plan)
            members = {name: self._members[name] for name in half.problem.unit}
            found.append(Then(half.problem, half.plan, members, half.handed, gm))
        return found

    def _seconds(self, then: Sequence[Then], moving: Moving) -> float:
        """Return the simulated seconds of both graphs."""
        parts = []
        for each, first, finds in zip(then, (0, self._count), (frozenset[str](), then[1].handed), strict=True):
            units = {
                name: tuple(dict.fromkeys(self._unit_of[slot.name] for slot in slots if slot.name in self._unit_of))
                for name, slots in each.members.items()
            }
            parts.append(Part(each.plan, first, units, finds))
        return step_seconds(self.problem, acted_plan(self.problem, parts, self._homes, saved=moving))


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
