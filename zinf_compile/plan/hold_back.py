"""Another rank's plan with less room: transfers start later, in the same order, so that collectives match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from zinf_compile.errors import BudgetError

from .plan import Fetch, Gather, Kind, Plan
from .planners._build import in_words, shortage
from .problem import StepProblem

Row = tuple[str, int]
"""A unit, and the boundary at which it is due."""


def within_room(problem: StepProblem, plan: Plan) -> Plan:
    """Return the plan, or with as little in flight as the order of its gathers allows where it exceeds the problem's budgets.

    Units stay gathered as long as the plan says, which decides how often ranks gather them. Raises `BudgetError` where there is
    no room for these.
    """
    if not shortage(problem, plan):
        return plan
    found = hold_back(plan)
    if over := shortage(problem, found):
        raise BudgetError(
            f"a graph that this rank compiles alone has {in_words(over)} too little for the units that stay gathered by the plan "
            "that all ranks follow; compile for the largest batch first, or set planner='one_ahead', which keeps none"
        )
    return found


def hold_back(plan: Plan) -> Plan:
    """Return the plan with each gather, and what it takes, as late as its own due and the gathers behind it allow."""
    starts: dict[Row, int] = {}
    behind: Gather | None = None
    for row in sorted(plan.shared.gathers, key=lambda row: (max(0, row.start), row.due), reverse=True):
        start = row.due
        if behind is not None:  # at one boundary they are issued in the order of their dues
            start = min(start, starts[behind.unit, behind.due] - (row.due > behind.due))
        starts[row.unit, row.due] = max(row.start, start)
        behind = row
    gathers = tuple(dataclasses.replace(row, start=starts[row.unit, row.due]) for row in plan.shared.gathers)
    later = _later(plan, starts)
    fetches = tuple(dataclasses.replace(row, start=later(row)) for row in plan.local.fetches)
    shared, local = dataclasses.replace(plan.shared, gathers=gathers), dataclasses.replace(plan.local, fetches=fetches)
    return dataclasses.replace(plan, shared=shared, local=local)


def _later(plan: Plan, starts: dict[Row, int]) -> Callable[[Fetch], int]:
    """Return when a fetch starts then: with its gather, or when it is due where none follows."""
    before: dict[str, list[Gather]] = {}
    for row in plan.shared.gathers:
        before.setdefault(row.unit, []).append(row)

    def start(fetch: Fetch) -> int:
        if fetch.kind is not Kind.PARAM:
            return fetch.start
        of = next((row for row in before.get(fetch.name, ()) if fetch.serves(row)), None)
        if of is None:
            return fetch.due
        return max(fetch.start, min(fetch.due, starts[of.unit, of.due]))

    return start
