"""The default: what is used again soonest stays, the next missing is fetched first, as early as memory allows."""

from __future__ import annotations

from zinf_compile.plan.plan import Plan
from zinf_compile.plan.problem import StepProblem

from ._build import ahead_by, build, checked, farthest
from ._from_walk import moved_by
from ._gaps import find_gaps
from ._residency import best_walk

RUNGS, RESERVES = 24, (0.0, 0.5, 1.0, 1.5)


def cached_prefetch(problem: StepProblem) -> Plan:
    homes = farthest(problem)
    base = build(problem, homes, ahead_by(problem, homes, {}), planner="cached_prefetch")
    found = find_gaps(problem, homes, base)
    best = best_walk(found.walk, found.gaps, rungs=RUNGS, reserves=RESERVES)
    if best is None:
        return checked(problem, base)
    return checked(problem, moved_by(problem, homes, best[0].moves).plan(problem, planner="cached_prefetch"))
