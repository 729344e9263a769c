"""The plan of a whole step whose graphs are each planned by themselves: what the backend acts out today, for `simulate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .plan import Homes, Kind, Plan
from .planners._build import build
from .planners._updates import deferred
from .problem import StepProblem


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One run of a graph in the step."""

    plan: Plan
    """Of the graph alone."""
    first: int
    """The number of its first region in the step."""
    units: Mapping[str, tuple[str, ...]]
    """The step's units by the graph's: a unit of a graph may be several in the step."""


def acted_plan(problem: StepProblem, parts: Sequence[Part], homes: Homes, *, defers: bool = False) -> Plan:
    """Return the plan with the transfers of all parts.

    Gradients leave as they are reduced. Updates run behind the last region, or each before its units' next use if the step
    `defers` them.
    """
    updates = deferred(problem, homes) if defers else None
    base = build(problem, homes, (), planner=next((part.plan.planner for part in parts), ""), updates=updates)
    gathers, fetches = [], []
    for part in parts:
        for row in part.plan.shared.gathers:
            times = {key: getattr(row, key) + part.first for key in ("start", "due", "until")}
            gathers += [dataclasses.replace(row, unit=name, **times) for name in part.units.get(row.unit, ())]
        for each in part.plan.local.fetches:
            if each.kind is Kind.PARAM:
                times = {key: getattr(each, key) + part.first for key in ("start", "due", "until")}
                fetches += [dataclasses.replace(each, name=name, **times) for name in part.units.get(each.name, ())]
    known = {unit.name for unit in problem.units if unit.is_gathered}
    shared = dataclasses.replace(base.shared, gathers=tuple(row for row in gathers if row.unit in known))
    return dataclasses.replace(base, shared=shared, local=dataclasses.replace(base.local, fetches=tuple(fetches)))
