"""The unit of the next region is on its way while one computes, as hooks of ZeRO-3 do it; just in time where memory is short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zinf_compile.plan.plan import Plan
from zinf_compile.plan.problem import StepProblem

from ._build import Stay, ahead_by, build, checked, farthest
from ._start_early import start_early


def one_ahead(problem: StepProblem) -> Plan:
    """Return the plan that fetches one use ahead; raise `BudgetError` if fetching just in time does not fit."""
    homes = farthest(problem)
    stays = ahead_by(problem, homes, {})
    base = checked(problem, build(problem, homes, stays, planner="one_ahead"))
    early = start_early(problem, base, homes, stays, use_before(problem, stays))
    return build(problem, homes, early, planner="one_ahead")


def use_before(problem: StepProblem, stays: Sequence[Stay]) -> Callable[[Stay], int]:
    """Return the function from a stay to the boundary at which the due before its own lies."""
    dues = sorted({stay.due for stay in stays})
    before = {due: dues[number - 1] if number else dues[-1] - problem.count for number, due in enumerate(dues)}
    return lambda stay: before[stay.due]
