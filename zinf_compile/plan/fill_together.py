"""Homes of parameters, gradients and states together with what becomes of saved values, under the same caps.

`backend/home_planner` calls it with its own account of memory. The choices, and what each costs, follow from the problem without
its budgets: a larger budget adds some and takes none away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from .fill_homes import Excess, Filled, fill_homes, no_bound
from .plan import Homes
from .planners._build import farthest, nearest
from .planners._homes import least_seconds
from .problem import StepProblem
from .saved_homes import Saving

Check = Callable[[Homes, Saving], Excess]


def _no_bound(homes: Homes, saving: Saving) -> Excess:
    return no_bound(homes)


def fill_together(
    problem: StepProblem, savings: Sequence[Saving], check: Check, *, at_least: Check = _no_bound
) -> tuple[Filled, Saving]:
    """Return homes and one of the choices for saved values that fit, and of which a step takes least on its busiest lane.

    Of those that are equal in this, the ones that move least. Where none fits, those are returned for which the least memory is
    missing. `savings` are in the order in which more leaves, or is made again. `at_least` bounds `check` as that of `fill_homes`.
    """

    def fill(saving: Saving) -> Filled:
        return fill_homes(problem, partial(_with, check, saving), at_least=partial(_with, at_least, saving))

    first, *others = savings
    if not others:
        return fill(first), first
    near, far = nearest(problem), farthest(problem)
    best: tuple[tuple[float, float], Filled, Saving] | None = None
    lacking: list[int] = []
    for saving in savings:
        if best is not None and together_seconds(problem, near, saving) >= best[0]:
            continue
        excess = check(far, saving)
        lacking.append(excess.lacking)
        if not excess.fits:
            continue
        filled = fill(saving)
        cost = together_seconds(problem, filled.homes, saving)
        if filled.excess.fits and (best is None or cost < best[0]):
            best = cost, filled, saving
    if best is not None:
        return best[1], best[2]
    least = lacking.index(min(lacking))
    tried = [savings[number] for number in sorted({0, least, len(savings) - 1})]  # nearer homes may need less for what moves
    found = [(fill(saving), saving) for saving in tried]
    return min(found, key=lambda row: (not row[0].excess.fits, row[0].excess.lacking))


def together_seconds(problem: StepProblem, homes: Homes, saving: Saving) -> tuple[float, float]:
    """Return the seconds of the busiest lane, of what a step moves at least, and those of all links.

    Without updates where all homes are as near as may be: what stays there is not asked what it costs.
    """
    if homes == nearest(problem):
        lanes = _beside(problem, homes, saving)
        return max(problem.compute_seconds + saving.again.seconds, *lanes.values(), 0.0), sum(lanes.values())
    return seconds_at(problem, homes, saving)


def seconds_at(problem: StepProblem, homes: Homes, saving: Saving) -> tuple[float, float]:
    """Return the same with updates, wherever the homes are."""
    return least_seconds(problem, homes, beside=_beside(problem, homes, saving), again=saving.again.seconds)


def _beside(problem: StepProblem, homes: Homes, saving: Saving) -> dict[str, float]:
    """Return the seconds by lane of what a choice for saved values moves: these, and what is gathered again."""
    lanes: dict[str, float] = defaultdict(float, saving.seconds)
    for lane, seconds in saving.again.lanes.items():
        lanes[lane] += seconds
    for unit, count in saving.again.fetched.items():
        for link in problem.hops(homes.params[unit], problem.device):
            lanes[link.on_lane] += link.seconds(count)
    return lanes


def _with(check: Check, saving: Saving, homes: Homes) -> Excess:
    return check(homes, saving)
