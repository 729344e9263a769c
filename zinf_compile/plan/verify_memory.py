"""The bytes of a plan at each moment, summed up for `verify` by itself. `occupancy` is what planners use; tests compare both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from zinf_compile.ir.tiers import Tier

from .plan import Kind, Plan
from .problem import StepProblem
from .update_traffic import update_traffic


def held(problem: StepProblem, plan: Plan) -> dict[Tier, npt.NDArray[np.int64]]:
    """Return the bytes on each tier while each region runs, and last while compute waits at the step."""
    sums = _Sums(problem)
    homes, device = plan.local.homes, problem.device
    for unit in problem.units:
        sums.always(homes.params[unit.name], unit.stored_bytes)
        if unit.name in plan.shared.resident:
            sums.always(device, unit.full_bytes)
    for piece in problem.pieces:
        sums.always(homes.states[piece.name], piece.state_bytes)
    for gather in plan.shared.gathers:
        sums.regions(device, problem.unit[gather.unit].full_bytes, gather.start, gather.until)
    for fetch in plan.local.fetches:
        size = problem.value[fetch.name].bytes if fetch.kind is Kind.SAVED else problem.unit[fetch.name].stored_bytes
        sums.regions(fetch.to, size, fetch.start, fetch.until)
    for number, region in enumerate(problem.regions):
        again = [problem.regions[each] for remake in plan.shared.remakes if remake.before == number for each in remake.regions]
        sums.regions(device, max(each.workspace_bytes for each in (region, *again)), number, number + 1)
    _saved(problem, plan, sums)
    _gradients(problem, plan, sums)
    _updates(problem, plan, sums)
    return sums.found


class _Sums:
    def __init__(self, problem: StepProblem) -> None:
        self.count = problem.count
        self.found = {tier: np.zeros(problem.count + 1, dtype=np.int64) for tier in problem.tiers}

    def always(self, tier: Tier, size: int) -> None:
        self.found[tier] += size

    def regions(self, tier: Tier, size: int, start: int, end: int) -> None:
        """Add bytes that are held in regions start … end - 1, and at each step between two of these."""
        count, table = self.count, self.found[tier]
        while end - start > count:
            table += size
            end -= count
        if end <= start:
            return
        first, length = start % count, end - start
        if first + length <= count:
            table[first : first + length] += size
        else:
            table[first:] += size
            table[: first + length - count] += size

    def step(self, tier: Tier, size: int) -> None:
        self.found[tier][self.count] += size


def _saved(problem: StepProblem, plan: Plan, sums: _Sums) -> None:
    device = problem.device
    before = {name: remake.before for remake in plan.shared.remakes for name in remake.values}
    for value in problem.saved:
        uses = (value.made_in, *value.used_in)
        stores = {store.source: store for store in plan.local.stores if (store.kind, store.name) == (Kind.SAVED, value.name)}
        fetches = [fetch for fetch in plan.local.fetches if (fetch.kind, fetch.name) == (Kind.SAVED, value.name)]
        end = max(uses) + 1
        if value.name in before:
            sums.regions(device, value.bytes, before[value.name], end)
            end = max(use for use in uses if use < before[value.name]) + 1
        if device in stores:
            end = stores[device].due
        sums.regions(device, value.bytes, value.made_in, end)
        for store in stores.values():
            if not store.to.in_memory:
                continue
            if store.to in stores:
                until = stores[store.to].due
            else:
                until = max((fetch.due for fetch in fetches if fetch.source == store.to), default=store.due)
            sums.regions(store.to, value.bytes, store.start, until)


def _gradients(problem: StepProblem, plan: Plan, sums: _Sums) -> None:
    device, count = problem.device, problem.count
    updated: dict[str, int] = defaultdict(lambda: count)
    for update in plan.local.updates:
        for name in problem.piece[update.piece].units:
            updated[name] = max(updated[name], update.due)
    reductions: dict[str, list[tuple[int, int]]] = defaultdict(list)
    runs = [(region.graph, region.micro_batch) for region in problem.regions]
    for reduction in plan.shared.reductions:
        unit = problem.unit[reduction.unit]
        sums.regions(device, unit.full_gradient_bytes, min(reduction.regions), reduction.due)
        if reduction.start == count:
            sums.step(device, unit.full_gradient_bytes)
        for added in reduction.regions[1:]:
            behind = next((number for number in range(added, count) if runs[number] != runs[added]), count)
            sums.regions(device, unit.full_gradient_bytes + unit.gradient_bytes, added, behind)
        reductions[unit.name].append((reduction.start, reduction.due))
    stored: dict[tuple[str, Tier], list[tuple[int, int, Tier]]] = defaultdict(list)
    for store in plan.local.stores:
        if store.kind is Kind.GRAD:
            stored[store.name, store.source].append((store.start, store.due, store.to))
    for unit in problem.units:
        size, home, last = unit.gradient_bytes, plan.local.homes.grads.get(unit.name), updated[unit.name]
        made = reductions[unit.name] or [(region, 0) for region in unit.gradients]
        if home is None or not made:
            continue
        if home == device:
            sums.regions(device, size, made[0][0], last)
            if last == count:
                sums.step(device, size)
            for start, due in made[1:] if unit.full_gradient_bytes else []:
                sums.regions(device, size, start, due)
                if start == count:
                    sums.step(device, size)
            continue
        for (start, _), (leaving, due, _) in zip(made, stored[unit.name, device], strict=False):
            sums.regions(device, size, start, due)
            if leaving == count and count in (start, due):  # else what it takes in the regions around covers the step
                sums.step(device, size)
        for number, (start, due, to) in enumerate(stored[unit.name, device]):
            if to.in_memory and to == home:
                sums.regions(to, size, start, last if number == 0 else due)
                if (last if number == 0 else due) == count:
                    sums.step(to, size)
            elif to.in_memory:
                gone = stored[unit.name, to][number][1]
                sums.regions(to, size, start, gone)
                if gone == count:
                    sums.step(to, size)


def _updates(problem: StepProblem, plan: Plan, sums: _Sums) -> None:
    local = plan.local
    if not local.updates:
        return
    largest: dict[Tier, int] = defaultdict(int)
    for update in local.updates:
        buffers = update_traffic(problem, local.homes, problem.piece[update.piece], update.on).buffers
        for tier, size in buffers.items():
            largest[tier] = max(largest[tier], size)
    first = min(update.start for update in local.updates)
    for tier, size in largest.items():
        sums.regions(tier, size * local.update_buffers, first, local.updates_done)
        if first == problem.count:
            sums.step(tier, size * local.update_buffers)


def over_room(problem: StepProblem, totals: dict[Tier, npt.NDArray[np.int64]]) -> Iterable[str]:
    """Yield a sentence for each tier that has less room than is held at some moment, naming the worst moment."""
    for tier, total in totals.items():
        room = problem.room(tier)
        worst = int(total.argmax())
        if total[worst] > room:
            when = "at the step" if worst == problem.count else f"in region {worst}"
            yield f"{when} {int(total[worst]):,} bytes are held on {tier}, which has room for {int(room):,}"
