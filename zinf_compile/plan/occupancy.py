"""Bytes that a plan takes on each tier, region by region. Follows from boundaries alone, see `plan`; no time is in it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from zinf_compile.ir.tiers import Tier

from .plan import Fetch, Kind, Plan, Store
from .problem import StepProblem
from .update_traffic import update_traffic


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """Bytes taken at boundary `start` and free at boundary `end` of the same or a later step."""

    tier: Tier
    what: str
    bytes: int
    start: int
    end: int
    at_step: bool = False
    """Taken for updates: also at boundary `start` itself, while compute waits there."""
    through_step: bool = False
    """Read by updates: also at boundary `end` itself, while compute waits there."""


class Moments:
    """Bytes at each moment of a step that repeats: one for each region, and the optimizer's step as the last."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._period = count + 1
        self._change = np.zeros(self._period + 1, dtype=np.int64)
        self._always = 0

    def add(self, interval: Interval) -> None:
        """Add what an interval takes, in each step."""
        first, last = self._index(interval.start), self._index(interval.end - 1)
        if (interval.at_step or interval.through_step) and interval.start % self._count == 0:
            first -= 1
            last = max(first, last)
        if interval.through_step and interval.end % self._count == 0:
            last = self._index(interval.end) - 1
        length = last - first + 1
        if length <= 0:
            return
        whole, rest = divmod(length, self._period)
        self._always += whole * interval.bytes
        begin = first % self._period
        end = begin + rest
        self._change[begin] += interval.bytes
        self._change[min(end, self._period)] -= interval.bytes
        if end > self._period:
            self._change[0] += interval.bytes
            self._change[end - self._period] -= interval.bytes

    def always(self, count: int) -> None:
        """Add bytes at all moments."""
        self._always += count

    def totals(self) -> npt.NDArray[np.int64]:
        """Return the bytes while each region runs, and last those during the step."""
        return np.cumsum(self._change[:-1]) + self._always

    def _index(self, boundary: int) -> int:
        return boundary + boundary // self._count


def occupied(problem: StepProblem, plan: Plan) -> dict[Tier, npt.NDArray[np.int64]]:
    """Return the bytes on each tier while each region runs, and last during the step."""
    moments = {tier: Moments(problem.count) for tier in problem.tiers}
    for tier, _, count in standing(problem, plan):
        moments[tier].always(count)
    for interval in intervals(problem, plan):
        moments[interval.tier].add(interval)
    found = {tier: each.totals() for tier, each in moments.items()}
    workspace = np.array([region.workspace_bytes for region in problem.regions] + [0], dtype=np.int64)
    for remake in plan.shared.remakes:
        again = max(problem.regions[number].workspace_bytes for number in remake.regions)
        workspace[remake.before] = max(workspace[remake.before], again)
    found[problem.device] = found[problem.device] + workspace
    return found


def standing(problem: StepProblem, plan: Plan) -> Iterator[tuple[Tier, str, int]]:
    """Yield (tier, what, bytes) of what is in its place during the whole step."""
    homes = plan.local.homes
    for unit in problem.units:
        yield homes.params[unit.name], f"shard of {unit.name}", unit.stored_bytes
    for piece in problem.pieces:
        yield homes.states[piece.name], f"states of {piece.name}", piece.state_bytes
    for name in plan.shared.resident:
        yield problem.device, f"unit {name}", problem.unit[name].full_bytes


def intervals(problem: StepProblem, plan: Plan) -> Iterator[Interval]:
    """Yield what is taken for a part of the step."""
    device = problem.device
    for gather in plan.shared.gathers:
        yield Interval(device, f"unit {gather.unit}", problem.unit[gather.unit].full_bytes, gather.start, gather.until)
    for fetch in plan.local.fetches:
        yield Interval(fetch.to, f"{fetch.kind} {fetch.name}", bytes_of(problem, fetch), fetch.start, fetch.until)
    yield from _saved(problem, plan)
    yield from _gradients(problem, plan)
    yield from _updates(problem, plan)


def bytes_of(problem: StepProblem, row: Fetch | Store) -> int:
    """Return the bytes that a transfer moves."""
    if row.kind is Kind.SAVED:
        return problem.value[row.name].bytes
    unit = problem.unit[row.name]
    return unit.gradient_bytes if row.kind is Kind.GRAD else unit.stored_bytes


def _saved(problem: StepProblem, plan: Plan) -> Iterator[Interval]:
    device = problem.device
    stores: dict[str, list[Store]] = defaultdict(list)
    fetched: dict[tuple[str, Tier], int] = {}
    for store in plan.local.stores:
        if store.kind is Kind.SAVED:
            stores[store.name].append(store)
    for fetch in plan.local.fetches:
        if fetch.kind is Kind.SAVED:
            fetched[fetch.name, fetch.source] = max(fetch.due, fetched.get((fetch.name, fetch.source), 0))
    remade = {name: remake.before for remake in plan.shared.remakes for name in remake.values}
    for value in problem.saved:
        last = max((value.made_in, *value.used_in)) + 1
        end = last
        if value.name in remade:
            before = remade[value.name]
            end = max(value.made_in, *(use for use in value.used_in if use < before)) + 1 if value.used_in else last
            yield Interval(device, f"saved {value.name} again", value.bytes, before, last)
        for store in stores[value.name]:
            if store.source == device:
                end = min(end, store.due) if value.name in remade else store.due
            if store.to.in_memory:
                gone = next((other.due for other in stores[value.name] if other.source == store.to), None)
                until = gone if gone is not None else fetched.get((value.name, store.to), store.due)
                yield Interval(store.to, f"saved {value.name}", value.bytes, store.start, until)
        yield Interval(device, f"saved {value.name}", value.bytes, value.made_in, end)


def _gradients(problem: StepProblem, plan: Plan) -> Iterator[Interval]:
    device = problem.device
    updated = updated_by(plan, problem)
    stores: dict[tuple[str, Tier], list[Store]] = defaultdict(list)
    for store in plan.local.stores:
        if store.kind is Kind.GRAD:
            stores[store.name, store.source].append(store)
    shards: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for reduction in plan.shared.reductions:
        unit = problem.unit[reduction.unit]
        size, late = unit.full_gradient_bytes, reduction.start == problem.count
        what = f"full gradient of {unit.name}"
        yield Interval(device, what, size, reduction.regions[0], reduction.due, through_step=late)
        for region in reduction.regions[1:]:  # which autograd adds behind its graph
            end = last_region(problem, region) + 1
            yield Interval(device, f"{what}, added", size + unit.gradient_bytes, region, end)
        shards[unit.name].append((reduction.start, reduction.due))
    for unit in problem.units:
        if not unit.gradients:
            continue
        made = shards[unit.name] or [(region, region + 1) for region in unit.gradients]
        home, last = plan.local.homes.grads[unit.name], updated.get(unit.name, problem.count)
        what = f"gradient of {unit.name}"
        if home == device:
            yield Interval(device, what, unit.gradient_bytes, made[0][0], last, through_step=True)
            if unit.full_gradient_bytes:
                for start, due in made[1:]:
                    late = start == problem.count
                    yield Interval(device, f"{what}, added", unit.gradient_bytes, start, due, through_step=late)
            continue
        for (start, _), store in zip(made, stores[unit.name, device], strict=False):
            late = store.start == problem.count
            yield Interval(device, what, unit.gradient_bytes, start, store.due, through_step=late)
        for number, store in enumerate(stores[unit.name, device]):
            if not store.to.in_memory:
                continue
            further = stores[unit.name, store.to]
            if store.to == home:
                if number == 0:
                    yield Interval(store.to, what, unit.gradient_bytes, store.start, last, through_step=True)
                    continue
                end = store.due
            else:
                end = further[number].due if number < len(further) else store.due
            late = end == problem.count
            yield Interval(store.to, what, unit.gradient_bytes, store.start, end, through_step=late)


def last_region(problem: StepProblem, region: int) -> int:
    """Return the last region of the run of a graph that `region` is part of."""
    own = problem.regions[region]
    while region + 1 < problem.count and problem.regions[region + 1].graph == own.graph:
        if problem.regions[region + 1].micro_batch != own.micro_batch:
            break
        region += 1
    return region


def updated_by(plan: Plan, problem: StepProblem) -> dict[str, int]:
    """Return for each unit the boundary at which its last piece is updated."""
    found: dict[str, int] = {}
    for update in plan.local.updates:
        for name in problem.piece[update.piece].units:
            found[name] = max(update.due, found.get(name, 0))
    return found


def _updates(problem: StepProblem, plan: Plan) -> Iterator[Interval]:
    local = plan.local
    if not local.updates:
        return
    start = min(update.start for update in local.updates)
    for tier, count in update_buffers(problem, plan).items():
        yield Interval(tier, "pieces being updated", count, start, local.updates_done, at_step=True)


def update_buffers(problem: StepProblem, plan: Plan) -> dict[Tier, int]:
    """Return the bytes of the buffers through which pieces are updated, by tier."""
    largest: dict[Tier, int] = {}
    for update in plan.local.updates:
        traffic = update_traffic(problem, plan.local.homes, problem.piece[update.piece], update.on)
        for tier, count in traffic.buffers.items():
            largest[tier] = max(count, largest.get(tier, 0))
    return {tier: count * plan.local.update_buffers for tier, count in largest.items()}
