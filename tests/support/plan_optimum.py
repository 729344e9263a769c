"""The fastest plan of a small problem with frozen units on one link, as a mixed-integer programme: an oracle for planners.

It decides what a plan decides: for each time between two uses of a unit whether it stays, or behind which region it is fetched
back, and in which order the link takes the fetches. Steps repeat, so a fetch may lie in the step before its use.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from zinf_compile.plan.problem import StepProblem, gaps


class _Rows:
    def __init__(self) -> None:
        self.terms: list[dict[int, float]] = []
        self.least: list[float] = []

    def at_least(self, terms: dict[int, float], least: float) -> None:
        self.terms.append(terms)
        self.least.append(least)


def optimum(problem: StepProblem, *, seconds: float = 60.0, gap: float = 1e-4) -> tuple[float, float]:
    """Return the seconds of the best plan that was found in time, and a bound that no plan beats; equal where it is proven."""
    count = problem.count
    device, far = problem.tiers
    link = problem.link(far, device)
    room = problem.room(device)
    cost = [region.seconds for region in problem.regions]
    rows, lower, upper, whole = _Rows(), [], [], []

    def variable(most: float, *, integer: bool = False) -> int:
        lower.append(0.0)
        upper.append(most)
        whole.append(int(integer))
        return len(lower) - 1

    longest = sum(cost) + sum(len(unit.uses) * link.seconds(unit.stored_bytes) for unit in problem.units)
    period = variable(longest)
    begin = [variable(longest) for _ in range(count)]  # of regions; region 0 begins at the end of what it waits for
    for region in range(count):
        after = {begin[region + 1]: 1.0} if region + 1 < count else {period: 1.0, begin[0]: 1.0}
        rows.at_least({**after, begin[region]: -1.0}, cost[region])
    held: list[dict[int, float]] = [defaultdict(float) for _ in range(count)]
    used = [0.0] * count
    moves = []
    for unit in problem.units:
        for use in unit.uses:
            used[use] += unit.stored_bytes
        for last, due in gaps(unit.uses, count, cyclic=True):
            starts = {at: variable(1.0, integer=True) for at in range(last + 1, due + 1)}
            kept = variable(1.0, integer=True)
            rows.at_least({kept: 1.0, **dict.fromkeys(starts.values(), 1.0)}, 1.0)
            for region in range(last + 1, due):
                held[region % count][kept] += unit.stored_bytes
                for at, column in starts.items():
                    if at <= region:
                        held[region % count][column] += unit.stored_bytes
            length, when = link.seconds(unit.stored_bytes), variable(3 * longest)
            big = 3 * longest
            for at, column in starts.items():  # not before the region before the boundary has ended
                before, shift = (at - 1) % count, (at - 1) // count
                rows.at_least({when: 1.0, begin[before]: -1.0, period: -float(shift), column: -big}, cost[before] - big)
            use, shift = due % count, due // count
            rows.at_least({begin[use]: 1.0, period: float(shift), when: -1.0, kept: big}, length)
            moves.append((last, due, length, when, kept))
    for region in range(count):
        rows.at_least({column: -size for column, size in held[region].items()}, used[region] - room)
    _one_after_the_other(moves, rows, variable, period, count, 4 * longest)
    matrix = coo_array(
        (
            [value for terms in rows.terms for value in terms.values()],
            (
                [number for number, terms in enumerate(rows.terms) for _ in terms],
                [column for terms in rows.terms for column in terms],
            ),
        ),
        shape=(len(rows.terms), len(lower)),
    ).tocsr()
    objective = np.zeros(len(lower))
    objective[period] = 1.0

    def solve(*, presolve: bool) -> OptimizeResult:
        return milp(
            objective,
            constraints=LinearConstraint(matrix, lb=np.array(rows.least)),
            bounds=Bounds(np.array(lower), np.array(upper)),
            integrality=np.array(whole),
            options={"time_limit": seconds, "mip_rel_gap": gap, "presolve": presolve},
        )

    found = solve(presolve=True)
    if found.x is None:  # HiGHS gives up on a few problems that it has simplified ("Solve error")
        found = solve(presolve=False)
    assert found.x is not None, found.message
    return float(found.fun), float(found.mip_dual_bound)


def _one_after_the_other(moves, rows, variable, period, count, big) -> None:  # type: ignore[no-untyped-def]
    """Of two fetches, of the same step or of two neighbouring ones, one ends before the other one begins, unless one stays."""
    for (number, one), (other_number, other) in itertools.product(enumerate(moves), enumerate(moves)):
        for shift in (0, 1):
            if shift == 0 and other_number <= number:
                continue
            if shift == 1 and number == other_number:
                rows.at_least({period: 1.0, one[4]: big}, one[2])
                continue
            (last, due, length, when, kept), (other_last, other_due, other_length, other_when, other_kept) = one, other
            if other_last + shift * count >= due:  # the windows follow each other
                rows.at_least({other_when: 1.0, period: float(shift), when: -1.0, kept: big, other_kept: big}, length)
                continue
            if other_due + shift * count <= last:
                rows.at_least({when: 1.0, period: -float(shift), other_when: -1.0, kept: big, other_kept: big}, other_length)
                continue
            first = variable(1.0, integer=True)
            rows.at_least(
                {other_when: 1.0, period: float(shift), when: -1.0, first: -big, kept: big, other_kept: big}, length - big
            )
            rows.at_least(
                {when: 1.0, period: -float(shift), other_when: -1.0, first: big, kept: big, other_kept: big}, other_length
            )
