"""A forward and its backward as one problem, and a plan of that as the plans of both graphs. `backend/replan` calls it.

Note: units that are handed on
    A unit that one row keeps from the forward to the backward is left on the device behind the forward, and found there by the
    backward. If another graph runs in between, or the values change, it isn't: then it is brought right before its use. So the
    backward's own plan has that row, and its problem the memory of the unit until then as a part of its regions'.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier

from .plan import Fetch, Gather, Homes, Kind, Local, Plan, Shared
from .problem import StepProblem
from .problem_parts import SavedValue

CODE_BETWEEN = 4
"""Times the bytes of a forward's results for which the caller's code has room before the backward, as for a loss of them."""

Row = TypeVar("Row", Gather, Fetch)


@dataclasses.dataclass(frozen=True, slots=True)
class Half:
    """One of both graphs, by itself."""

    problem: StepProblem
    plan: Plan
    handed: frozenset[str]
    """Units that a forward leaves on the device, or that a backward finds there."""
    held: tuple[int, ...]
    """Bytes of those that a backward has found and not used yet, in each region; less what it need not bring there."""

    @property
    def with_held(self) -> StepProblem:
        """Return the problem that the plan has to fulfil: with what is found as a part of the regions' memory."""
        regions = (
            dataclasses.replace(region, workspace_bytes=max(0, region.workspace_bytes + more))
            for region, more in zip(self.problem.regions, self.held, strict=True)
        )
        return dataclasses.replace(self.problem, regions=tuple(regions))


def joined(both: StepProblem, forward: StepProblem, backward: StepProblem, *, between: int = 0) -> StepProblem:
    """Return the problem of `both` graphs with the seconds and the memory that each has by itself.

    `between`: bytes of the device that the caller's code takes behind the forward, before the backward begins.
    """
    device, alone = both.device, (forward, backward)
    rooms = {tier: [_room_beside_shards(problem, tier) for problem in alone] for tier in both.tiers}
    left = [
        room - region.workspace_bytes for problem, room in zip(alone, rooms[device], strict=True) for region in problem.regions
    ]
    left[forward.count] -= between
    most = max(left)
    room_of = {tier: min(found) for tier, found in rooms.items()} | {device: most}
    regions = [
        dataclasses.replace(region, seconds=own.seconds, workspace_bytes=0 if math.isinf(most) else int(most - each))
        for region, own, each in zip(both.regions, [*forward.regions, *backward.regions], left, strict=True)
    ]
    return _with_room(dataclasses.replace(both, regions=tuple(regions)), room_of)


def away_in_between(values: Iterable[SavedValue], count: int) -> Iterator[SavedValue]:
    """Yield those that may be away between their last use in the forward, of `count` regions, and the first one behind it.

    Only these two are their uses then: what is before the one and behind the other is their region's memory.
    """
    for value in values:
        last = max(use for use in (value.made_in, *value.used_in) if use < count)
        first = min((use for use in value.used_in if use >= count), default=last)
        if first > last + 1:
            yield dataclasses.replace(value, made_in=last, used_in=(first,))


def with_saved(both: StepProblem, values: Sequence[SavedValue], plan: Plan) -> StepProblem:
    """Return the problem with saved values of their own, which its regions' memory counts as `plan` has them move."""
    taken = [region.workspace_bytes for region in both.regions]
    known = {value.name: value for value in values}
    spans = [
        (row.name, known[row.name].made_in, row.due)
        for row in plan.local.stores
        if row.name in known and row.source == both.device
    ]
    spans += [(row.name, row.start, row.due + 1) for row in plan.local.fetches if row.name in known and row.to == both.device]
    for name, start, end in spans:
        for region in range(start, end):
            taken[region] -= known[name].bytes
    regions = (
        dataclasses.replace(region, workspace_bytes=max(0, count)) for region, count in zip(both.regions, taken, strict=True)
    )
    rooms = {tier: _room_beside_shards(both, tier) for tier in both.tiers}
    for value in values:
        for choice in value.choices:
            rooms[Tier(choice)] += value.bytes  # it has its place there
    return _with_room(dataclasses.replace(both, regions=tuple(regions), saved=tuple(values)), rooms)


def retimed(moving: Mapping[str, SavedMemory], plan: Plan, device: Tier) -> dict[str, SavedMemory]:
    """Return saved memory, by the names of its values, that leaves and comes back when a plan says."""
    lags = {row.name: row.due - row.start for row in plan.local.stores if row.kind is Kind.SAVED and row.source == device}
    leads = {row.name: row.due - row.start for row in plan.local.fetches if row.kind is Kind.SAVED and row.to == device}
    return {
        name: dataclasses.replace(memory, lag=max(1, lags[name]), lead=max(1, leads[name])) if name in lags else memory
        for name, memory in moving.items()
    }


def with_held(both: StepProblem, more: Sequence[int]) -> StepProblem:
    """Return the problem without saved values of its own, with more memory of compute in each region, or in the first ones."""
    regions = (
        dataclasses.replace(region, workspace_bytes=max(0, region.workspace_bytes + count))
        for region, count in zip(both.regions, [*more, *[0] * (both.count - len(more))], strict=True)
    )
    return dataclasses.replace(both, regions=tuple(regions))


def halves(both: StepProblem, plan: Plan, count: int, *, between: int = 0) -> tuple[Half, Half]:
    """Return a plan as those of both graphs, of which the first one has `count` regions; `between` as `joined` has added it."""
    handed = {name: (due, until) for name, due, until in _crossing(both, plan, count)}
    names = frozenset(handed)
    ahead, back = _part(both, 0, count), with_held(_part(both, count, both.count), [-between])
    held = [between] + [0] * (back.count - 1)
    for name, (due, _) in handed.items():
        unit = both.unit[name]
        for region in range(due - count):
            held[region] += unit.full_bytes or unit.stored_bytes
        held[due - count] -= unit.stored_bytes if unit.is_gathered else 0
    return (
        Half(ahead, _of_forward(ahead, both, plan, count, names), names, (0,) * ahead.count),
        Half(back, _of_backward(back, both, plan, count, handed), names, tuple(held)),
    )


def _shards(problem: StepProblem, tier: Tier) -> int:
    return sum(unit.stored_bytes for unit in problem.units if unit.home == tier)


def _room_beside_shards(problem: StepProblem, tier: Tier) -> float:
    return problem.room(tier) - _shards(problem, tier)


def _with_room(problem: StepProblem, rooms: Mapping[Tier, float]) -> StepProblem:
    """Return the problem with so much room beside its shards."""
    return problem.with_budgets(
        **{tier: None if math.isinf(room) else max(0, int(room) + _shards(problem, tier)) for tier, room in rooms.items()}
    )


def _part(both: StepProblem, first: int, end: int) -> StepProblem:
    """Return the problem of some regions and the units that they use, with the memory that all have."""
    units = [
        dataclasses.replace(unit, uses=uses)
        for unit in both.units
        if (uses := tuple(use - first for use in unit.uses if first <= use < end))
    ]
    part = dataclasses.replace(both, regions=both.regions[first:end], units=tuple(units))
    return _with_room(part, {tier: _room_beside_shards(both, tier) for tier in both.tiers})


def _crossing(both: StepProblem, plan: Plan, count: int) -> Iterator[tuple[str, int, int]]:
    """Yield the units that a row keeps from the forward to a use in the backward: name, first use there, end of the stay."""
    found = [(row.unit, row.due, row.until) for row in plan.shared.gathers]
    for row in _of_units(plan):
        if row.to == both.device and not both.unit[row.name].is_gathered:
            found.append((row.name, row.due, row.until))
    for name, due, until in found:
        uses = [use for use in both.unit[name].uses if count <= use < until]
        if due < count < until and uses:
            yield name, uses[0], until


def _of_units(plan: Plan) -> list[Fetch]:
    return [row for row in plan.local.fetches if row.kind is Kind.PARAM]


def _of_forward(part: StepProblem, both: StepProblem, plan: Plan, count: int, handed: Collection[str]) -> Plan:
    def until(name: str, row: Gather | Fetch) -> int:
        last = count if name in handed else max((use + 1 for use in both.unit[name].uses if use < count), default=0)
        return row.until if row.until <= count else max(row.due, last)

    gathers = [dataclasses.replace(row, until=until(row.unit, row)) for row in plan.shared.gathers if row.due < count]
    fetches = [dataclasses.replace(row, until=until(row.name, row)) for row in _of_units(plan) if row.due < count]
    return _plan_of(part, plan, gathers, fetches)


def _of_backward(part: StepProblem, both: StepProblem, plan: Plan, count: int, handed: Mapping[str, tuple[int, int]]) -> Plan:
    gathers, fetches = list[Gather](), list[Fetch]()
    for name, (due, until) in handed.items():
        unit = both.unit[name]
        if unit.is_gathered:
            gathers.append(Gather(name, due - count, due - count, until - count))
        for link in both.hops(unit.home or both.device, both.device)[-1:]:
            assert link.source is not None
            ends = due + 1 if unit.is_gathered else until
            fetches.append(Fetch(Kind.PARAM, name, link.source, both.device, due - count, due - count, ends - count))
    for row in plan.shared.gathers:
        if row.due >= count:
            gathers.append(_moved(row, count))
    for each in _of_units(plan):
        if each.due >= count:
            fetches.append(_moved(each, count))
    return _plan_of(part, plan, gathers, [*_sources(both, fetches), *fetches])


def _moved(row: Row, first: int) -> Row:
    return dataclasses.replace(row, start=max(0, row.start - first), due=row.due - first, until=row.until - first)


def _sources(both: StepProblem, fetches: Sequence[Fetch]) -> Iterator[Fetch]:
    """Yield the hops that bring what other ones take on, where the forward's copy is not there any more."""
    known = defaultdict[tuple[str, Tier], list[tuple[int, int]]](list)
    for row in fetches:
        known[row.name, row.to].append((row.start, row.until))
    for row in fetches:
        for link in both.hops(both.unit[row.name].home or row.source, row.source):
            assert link.source is not None
            assert link.destination is not None
            spans = known[row.name, link.destination]
            if not any(start <= row.start and row.due < until for start, until in spans):
                spans.append((row.start, row.due + 1))
                yield Fetch(Kind.PARAM, row.name, link.source, link.destination, row.start, row.due, row.due + 1)


def _plan_of(part: StepProblem, plan: Plan, gathers: Sequence[Gather], fetches: Sequence[Fetch]) -> Plan:
    homes = plan.local.homes
    of_part = Homes(
        params={name: tier for name, tier in homes.params.items() if name in part.unit},
        grads={name: tier for name, tier in homes.grads.items() if name in part.unit},
    )
    resident = tuple(name for name in plan.shared.resident if name in part.unit)
    shared = Shared(gathers=tuple(gathers), resident=resident)
    return Plan(shared=shared, local=Local(homes=of_part, fetches=tuple(fetches)), planner=plan.planner)
