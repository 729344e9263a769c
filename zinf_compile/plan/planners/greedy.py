"""Everything is released behind its use, and brought back as early as memory allows: the rules of graphs without a plan."""

from __future__ import annotations

from zinf_compile.plan.plan import Plan
from zinf_compile.plan.problem import StepProblem

from ._build import ahead_by, build, checked, farthest
from ._start_early import start_early


def greedy(problem: StepProblem) -> Plan:
    """Return the plan that keeps nothing and fetches ahead without limit; raise `BudgetError` if just in time does not fit."""
    homes = farthest(problem)
    stays = ahead_by(problem, homes, {})
    base = checked(problem, build(problem, homes, stays, planner="greedy"))
    early = start_early(problem, base, homes, stays, lambda stay: stay.until - problem.count)
    return build(problem, homes, early, planner="greedy")
