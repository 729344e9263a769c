"""Nothing ahead: each unit is brought when its region is reached, and released behind it. Needs the least memory."""

from __future__ import annotations

from zinf_compile.plan.plan import Plan
from zinf_compile.plan.problem import StepProblem

from ._build import ahead_by, build, checked, farthest


def just_in_time(problem: StepProblem) -> Plan:
    """Return the plan that moves everything when it is needed; raise `BudgetError` if even that does not fit."""
    homes = farthest(problem)
    return checked(problem, build(problem, homes, ahead_by(problem, homes, {}), planner="just_in_time"))
