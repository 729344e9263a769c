"""The largest units stay from one use to the next as long as there is room; the others come one use ahead, as FSDP2's do."""

from __future__ import annotations

from zinf_compile.plan.plan import Plan
from zinf_compile.plan.problem import StepProblem

from ._build import ahead_by, build, checked, farthest
from ._from_walk import moved_by
from ._gaps import find_gaps
from ._residency import fill
from ._start_early import start_early
from ._walk import Move
from .one_ahead import use_before


def largest_first(problem: StepProblem) -> Plan:
    """Return the plan that keeps the largest units between uses; raise `BudgetError` if fetching just in time does not fit."""
    homes = farthest(problem)
    base = checked(problem, build(problem, homes, ahead_by(problem, homes, {}), planner="largest_first"))
    found = find_gaps(problem, homes, base, fixed=problem.value)
    gaps = found.gaps
    order = sorted((n for n, gap in enumerate(gaps) if gap.may_stay), key=lambda number: gaps[number].kept[0], reverse=True)
    kept = fill(found.walk, gaps, order, found.walk.free[0])
    moved = moved_by(problem, homes, [Move(gap, gap.last + 1, gap.next) for n, gap in enumerate(gaps) if n not in kept])
    late = moved.plan(problem, planner="largest_first")
    early = start_early(problem, late, moved.homes, moved.stays, use_before(problem, moved.stays))
    return moved.plan(problem, planner="largest_first", stays=early)
