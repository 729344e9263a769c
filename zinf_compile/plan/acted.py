"""The plan of a whole step whose graphs are each planned by themselves: what the backend acts out today, for `simulate`."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from zinf_compile.ir.saved_memory import SavedMemory

from .plan import Fetch, Gather, Homes, Kind, Plan, Store, Update
from .planners._build import Stay, build, in_order, update_tier
from .planners._updates import deferred
from .problem import StepProblem
from .problem_parts import Region, SavedValue

Row = TypeVar("Row", Fetch, Gather)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One run of a graph in the step."""

    plan: Plan
    """Of the graph alone."""
    first: int
    """The number of its first region in the step."""
    units: Mapping[str, tuple[str, ...]]
    """The step's units by the graph's: a unit of a graph may be several in the step."""
    finds: Collection[str] = ()
    """The graph's units that a backward finds on the device, or the shards of which, and brings if it doesn't."""


def acted_plan(
    problem: StepProblem,
    parts: Sequence[Part],
    homes: Homes,
    *,
    saved: Mapping[str, SavedMemory] = MappingProxyType({}),
    defers: bool = False,
    in_flight: int | None = None,
) -> Plan:
    """Return the plan with the transfers of all parts.

    Gradients leave as they are reduced. Updates run behind the last region, or those of the host each before its units' next
    use if the step `defers` them. `saved`: the values that leave the device between forward and backward, without the number of
    a micro-batch.
    `in_flight`: bytes of gradients that leave by one hop, for which compute waits only where more would be under way at once.
    """
    updates = _deferred(problem, homes) if defers else None
    moving = []
    for value in problem.saved:
        memory = saved.get(value.name.partition(", ")[0])
        if memory is not None and any(_is_other(problem.regions[used], problem.regions[value.made_in]) for used in value.used_in):
            moving.append(_Away.of(problem, value, memory))
    base = build(
        problem,
        homes,
        (),
        planner=next((part.plan.planner for part in parts), ""),
        saved_stays=[away.stay for away in moving],
        saved_stores=[store for away in moving for store in away.stores],
        updates=updates,
    )
    gathers: list[Gather] = []
    fetches: list[Fetch] = []
    for part in parts:
        for row in part.plan.shared.gathers:
            times = {key: getattr(row, key) + part.first for key in ("start", "due", "until")}
            gathers += [dataclasses.replace(row, unit=name, **times) for name in part.units.get(row.unit, ())]
        for each in part.plan.local.fetches:
            if each.kind is Kind.PARAM:
                times = {key: getattr(each, key) + part.first for key in ("start", "due", "until")}
                fetches += [dataclasses.replace(each, name=name, **times) for name in part.units.get(each.name, ())]
    if problem.world_size == 1:
        fetches, gathers = _handed_on(problem, parts, fetches, gathers)
    else:
        fetches = _shards_handed_on(problem, parts, fetches)
    fetches += [row for row in base.local.fetches if row.kind is Kind.SAVED]  # graphs issue them behind those of units
    known = {unit.name for unit in problem.units if unit.is_gathered}
    shared = dataclasses.replace(base.shared, gathers=tuple(row for row in gathers if row.unit in known))
    stores = base.local.stores if in_flight is None else _within(problem, base.local.stores, in_flight, begins=defers)
    return dataclasses.replace(base, shared=shared, local=dataclasses.replace(base.local, fetches=tuple(fetches), stores=stores))


def _deferred(problem: StepProblem, homes: Homes) -> tuple[Update, ...]:
    """Return updates beside the next step's regions, but for those that a device beside the host makes."""
    if problem.host == problem.device:
        return deferred(problem, homes)
    pieces = (
        dataclasses.replace(piece, deferrable=False)
        if update_tier(problem, homes.states[piece.name]) == problem.device
        else piece
        for piece in problem.pieces
    )
    return deferred(dataclasses.replace(problem, pieces=tuple(pieces)), homes)


def _handed_on(
    problem: StepProblem, parts: Sequence[Part], fetches: Sequence[Fetch], gathers: Sequence[Gather]
) -> tuple[list[Fetch], list[Gather]]:
    """Return the rows without those of units that a backward finds, as the forward right before it has left them.

    It finds what it begins with, and what its plan says.
    """
    regions, device = problem.regions, problem.device
    full: dict[str, list[Fetch | Gather]] = defaultdict(list)
    for row in fetches:
        if row.to == device and not problem.unit[row.name].is_gathered:
            full[row.name].append(row)
    for gather in gathers:
        full[gather.unit].append(gather)
    stays: dict[int, int] = {}
    dropped: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for before, behind in itertools.pairwise(parts):
        if not _is_pair(regions[before.first], regions[behind.first]):
            continue
        begins, finds = behind.first, {name for own in behind.finds for name in behind.units.get(own, ())}
        for name, rows in full.items():
            left = next((row for row in rows if row.until == begins), None)
            found = min((row for row in rows if row.due >= begins), key=lambda row: row.due, default=None)
            if left is not None and found is not None and (found.due == begins or name in finds):
                stays[id(left)] = found.until
                dropped[name].append((begins, found.due))

    def is_dropped(name: str, due: int) -> bool:
        return any(first <= due <= last for first, last in dropped.get(name, ()))

    def stayed(row: Row) -> Row:
        return dataclasses.replace(row, until=stays.get(id(row), row.until))

    return (
        [stayed(row) for row in fetches if not is_dropped(row.name, row.due)],
        [stayed(row) for row in gathers if not is_dropped(row.unit, row.due)],
    )


def _shards_handed_on(problem: StepProblem, parts: Sequence[Part], fetches: Sequence[Fetch]) -> list[Fetch]:
    """Return the rows without those of shards that a backward finds, of which the forward right before it keeps its last ones."""
    found = list(fetches)
    for before, behind in itertools.pairwise(parts):
        begins = behind.first
        if not behind.finds or not _is_pair(problem.regions[before.first], problem.regions[begins]):
            continue
        for name in (name for own in behind.finds for name in behind.units.get(own, ())):
            rows = [row for row in found if row.name == name and row.to == problem.device]
            last = max((row for row in rows if before.first <= row.due < begins), key=lambda row: row.due, default=None)
            first = min((row for row in rows if row.due >= begins), key=lambda row: row.due, default=None)
            if last is not None and first is not None:
                found = [row for row in found if row.name != name or not begins <= row.due <= first.due]
                found[found.index(last)] = dataclasses.replace(last, until=first.until)
    return found


def _is_pair(before: Region, behind: Region) -> bool:
    """Say whether two regions are of a forward and its backward."""
    backward = before.graph.replace("forward", "backward", 1)
    return before.graph != backward and (behind.graph, behind.micro_batch) == (backward, before.micro_batch)


def _within(problem: StepProblem, stores: Sequence[Store], limit: int, *, begins: bool) -> tuple[Store, ...]:
    """Return the stores, those of gradients due where the next ones would exceed the limit, or at the step.

    Where the next step `begins` meanwhile, compute waits for the last ones before it goes on.
    """
    hops = Counter((row.kind, row.name, row.start) for row in stores)
    found = list(stores)
    under_way: deque[tuple[int, int]] = deque()
    held = 0
    for number, row in enumerate(stores):
        unit = problem.unit[row.name] if row.kind is Kind.GRAD else None
        if unit is None or row.source != problem.device or hops[row.kind, row.name, row.start] > 1:
            continue
        taken = unit.full_gradient_bytes + unit.gradient_bytes  # the full one until it is reduced
        while under_way and held + taken > limit:
            oldest, size = under_way.popleft()
            held -= size
            found[oldest] = dataclasses.replace(found[oldest], due=max(row.start, found[oldest].start))
        under_way.append((number, unit.gradient_bytes))
        held += unit.gradient_bytes
    for number, _ in under_way:
        found[number] = dataclasses.replace(found[number], due=problem.count + begins)
    return in_order(problem, found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Away:
    """A saved value that leaves the device, and comes back."""

    stores: tuple[Store, ...]
    stay: Stay

    @classmethod
    def of(cls, problem: StepProblem, value: SavedValue, memory: SavedMemory) -> _Away:
        """Return the hops of a value: behind its last use in the forward, and as the memory says in front of the first one."""
        regions, made = problem.regions, problem.regions[value.made_in]
        here = [region for region in value.used_in if regions[region].graph == made.graph]
        back = [region for region in value.used_in if regions[region].graph != made.graph]
        start, due = max(here, default=value.made_in) + 1, min(back)
        ends, begins = start, due
        while ends < problem.count and not _is_other(regions[ends], made):
            ends += 1
        while begins and not _is_other(regions[begins - 1], regions[due]):
            begins -= 1
        stores, left = [], start
        for link in problem.hops(problem.device, memory.tier):
            assert link.source is not None
            assert link.destination is not None
            began, left = left, min(ends, left + (memory.lag if link.source == problem.device else 1))
            stores.append(Store(Kind.SAVED, value.name, link.source, link.destination, began, left))
        return cls(tuple(stores), Stay(value.name, max(begins, due - memory.lead - len(stores) + 1), due, max(back) + 1))


def _is_other(region: Region, one: Region) -> bool:
    """Say whether two regions are of different runs of graphs."""
    return (region.graph, region.micro_batch) != (one.graph, one.micro_batch)
