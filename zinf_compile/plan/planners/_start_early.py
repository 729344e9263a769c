"""Moves the starts of transfers forward into memory that is left, in the order of their dues."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Homes, Kind, Plan
from zinf_compile.plan.problem import StepProblem

from ._build import Stay

AT_FIRST = 2
"""Largest units, in bytes, that may be brought before a step's first region, while the last gradient leaves and is applied."""


def start_early(
    problem: StepProblem, plan: Plan, homes: Homes, stays: Sequence[Stay], least: Callable[[Stay], int]
) -> list[Stay]:
    """Return the stays, sorted by due and started as early as memory allows, not before boundary `least`.

    `plan` has them just in time, which says what memory is left. Each starts no earlier than the one before it in the order of
    dues: earlier it would only wait for its link. The order is that of a step that repeats, so it is followed twice.
    """
    free = _Free(problem, plan)
    order = sorted(stays, key=lambda stay: stay.due)
    starts = [stay.due for stay in order]
    count = problem.count
    reached = -count
    behind = _behind(order, count)
    for _ in range(2):
        for number, stay in enumerate(order):
            old = starts[number]
            earliest = max(least(stay), reached, behind[number], 0 if problem.unit[stay.name].trained else -count)
            sizes = path_bytes(problem, homes, stay)
            new = free.earliest(sizes, old, earliest)
            free.take(sizes, new, old)
            starts[number] = new
            reached = new
        reached -= count
    return [dataclasses.replace(stay, start=start) for stay, start in zip(order, starts, strict=True)]


def as_early(problem: StepProblem, plan: Plan) -> Plan:
    """Return the plan with fetches of units by one hop started as early as memory allows, in the order of all dues.

    By the costs of the problem that may gain nothing. But links are often free when it doesn't say so, as while the gradients of
    the step before still leave. What the first region needs may be updated last then: as much as `AT_FIRST` largest units may be
    in front of it, and all else starts behind that region.

    On several ranks a shard waits for its gather, which takes far more memory and starts when it did, or behind the first region:
    rows that are looked up there would wait for all that is in front of them, on the same lanes.
    """
    free, homes = _Free(problem, plan), plan.local.homes.params
    found, ends = list(plan.local.fetches), dict[str, int]()
    reached, begun, later = 0, 0, dict[tuple[str, int], int]()
    most = AT_FIRST * max((unit.stored_bytes for unit in problem.units), default=0)
    for number in sorted(range(len(found)), key=lambda number: found[number].due):
        row = found[number]
        if row.kind is Kind.PARAM and row.to == problem.device and row.source == homes[row.name] and row.start >= 0:
            size = {problem.device: problem.unit[row.name].stored_bytes}
            first = min(row.due, 1) if begun + size[problem.device] > most else 0
            start = max(first, free.earliest(size, row.start, max(reached, first, ends.get(row.name, 0))))
            begun += size[problem.device] if start == 0 else 0
            free.take(size, start, max(start, row.start))
            found[number] = dataclasses.replace(row, start=start)
            ends[row.name] = row.until
            later |= {(row.name, row.due): start} if start > row.start else {}
        reached = max(reached, found[number].start + (row.kind is Kind.SAVED))  # which graphs issue behind units
    gathers = (dataclasses.replace(row, start=max(row.start, later.get((row.unit, row.due), 0))) for row in plan.shared.gathers)
    shared = dataclasses.replace(plan.shared, gathers=tuple(gathers)) if later else plan.shared
    return dataclasses.replace(plan, shared=shared, local=dataclasses.replace(plan.local, fetches=tuple(found)))


def _behind(order: Sequence[Stay], count: int) -> list[int]:
    """Return for each stay the boundary at which the same unit's stay before it ends."""
    own: dict[str, list[Stay]] = defaultdict(list)
    for stay in order:
        own[stay.name].append(stay)
    found = {}
    for stays in own.values():
        for before, stay in zip([stays[-1], *stays], stays, strict=False):
            found[stay.name, stay.due] = before.until - (count if before.due >= stay.due else 0)
    return [found[stay.name, stay.due] for stay in order]


def path_bytes(problem: StepProblem, homes: Homes, stay: Stay) -> dict[Tier, int]:
    """Return what a stay of a unit takes on each tier from its start until its due."""
    unit, found = problem.unit[stay.name], {}
    for link in problem.hops(homes.params[stay.name], problem.device):
        assert link.destination is not None
        found[link.destination] = unit.stored_bytes
    if unit.is_gathered:
        found[problem.device] = found.get(problem.device, 0) + unit.full_bytes
    return found


class _Free:
    """Bytes that are left while each region runs, and while the step does."""

    def __init__(self, problem: StepProblem, plan: Plan) -> None:
        self._count = problem.count
        self._left = {tier: np.minimum(problem.room(tier), 2.0**62) - totals for tier, totals in occupied(problem, plan).items()}

    def earliest(self, sizes: dict[Tier, int], due: int, earliest: int) -> int:
        """Return the first boundary from which on the bytes are free until boundary `due`."""
        start = due
        while start > earliest and all(self._fits(tier, size, start - 1, start) for tier, size in sizes.items()):
            start -= 1
        return start

    def _fits(self, tier: Tier, size: int, start: int, end: int) -> bool:
        return all(self._left[tier][moment] >= size for moment in self._moments(start, end))

    def take(self, sizes: dict[Tier, int], start: int, due: int) -> None:
        for tier, size in sizes.items():
            for moment in self._moments(start, due):
                self._left[tier][moment] -= size

    def _moments(self, start: int, end: int) -> list[int]:
        """Return the moments between two boundaries; the step is one if a boundary of it lies strictly between."""
        count = self._count
        found = []
        for boundary in range(start, end):
            found.append(boundary % count)
            if boundary % count == 0 and boundary > start:
                found.append(count)
        return found
