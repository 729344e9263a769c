"""Gradients and updates of a plan, for `verify`: each gradient gets home once, each piece is updated once and in time."""

from __future__ import annotations

from collections import Counter, defaultdict

from zinf_compile.ir.tiers import Tier

from .plan import Fetch, Gather, Kind, Plan, Reduction, Store, Update
from .problem import StepProblem
from .problem_parts import Unit
from .update_traffic import update_traffic


def check_gradients(problem: StepProblem, plan: Plan) -> list[str]:
    """Return what is wrong with reductions, and with the ways of gradients to their homes."""
    wrong: list[str] = []
    reductions: dict[str, list[Reduction]] = defaultdict(list)
    for reduction in plan.shared.reductions:
        reductions[reduction.unit].append(reduction)
    stores: dict[tuple[str, Tier], list[Store]] = defaultdict(list)
    for store in plan.local.stores:
        if store.kind is Kind.GRAD:
            stores[store.name, store.source].append(store)
    for unit in problem.units:
        own = reductions[unit.name]
        if unit.full_gradient_bytes:
            times = Counter(region for reduction in own for region in reduction.regions)
            wrong += [f"the gradient of {unit.name!r} from region {r} is not reduced" for r in unit.gradients if not times[r]]
            wrong += [f"the gradient of {unit.name!r} from region {r} is reduced {n} times" for r, n in times.items() if n > 1]
            wrong += [f"{unit.name!r} has no gradient in region {region}" for region in times if region not in unit.gradients]
            wrong += [
                f"{row}: region {max(row.regions)} has not run yet" for row in own if row.start <= max(row.regions, default=0)
            ]
            if unit.reduced_at_step:
                early = [row for row in own if row.start < problem.count]
                wrong += [f"{row}: the gradient is added up until the step" for row in early]
        elif own:
            wrong.append(f"{own[0]}: no full gradient is there to be reduced")
        if unit.gradients:
            wrong += _way_home(problem, plan, unit, own, stores)
    return wrong


def _way_home(
    problem: StepProblem, plan: Plan, unit: Unit, own: list[Reduction], stores: dict[tuple[str, Tier], list[Store]]
) -> list[str]:
    wrong, home = [], plan.local.homes.grads[unit.name]
    made = [row.start for row in own] if unit.full_gradient_bytes else [region + 1 for region in unit.gradients]
    hops = problem.hops(problem.device, home)
    passed = {link.source for link in hops}
    for tier in problem.tiers:
        found = stores[unit.name, tier]
        if tier not in passed:
            wrong += [f"{store}: the gradient lives on {home}" for store in found]
        elif len(found) != len(made):
            wrong.append(f"the gradient of {unit.name!r} leaves {tier} {len(found)} times, and is made {len(made)} times")
        else:
            wrong += [
                f"{store}: the gradient is not there yet" for store, start in zip(found, made, strict=True) if store.start < start
            ]
            made = [store.start for store in found]
    return wrong


def check_updates(problem: StepProblem, plan: Plan) -> list[str]:
    """Return what is wrong with updates: missing, too early, too late, in the wrong place, or waiting for each other."""
    wrong: list[str] = []
    local, count = plan.local, problem.count
    times = Counter(update.piece for update in local.updates)
    wrong += [f"piece {piece.name!r} is not updated" for piece in problem.pieces if not times[piece.name]]
    wrong += [f"piece {name!r} is updated {n} times" for name, n in times.items() if n > 1]
    arrivals: dict[str, list[Gather | Fetch]] = defaultdict(list)
    for gather in plan.shared.gathers:
        arrivals[gather.unit].append(gather)
    for fetch in local.fetches:
        if fetch.kind is Kind.PARAM:
            arrivals[fetch.name].append(fetch)
    buffered: list[tuple[Update, bool]] = []
    for update in local.updates:
        piece = problem.piece[update.piece]
        if update.start < count:
            wrong.append(f"{update}: the step is not called before boundary {count}")
        if not update.start <= update.due <= 2 * count:
            wrong.append(f"{update}: boundaries are out of order")
        if update.on not in (problem.device, problem.host):
            wrong.append(f"{update}: nothing computes on {update.on}")
        elif problem.allowed.update and update.on not in problem.allowed.update:
            wrong.append(f"{update}: the user allows updates on {', '.join(problem.allowed.update)}")
        else:
            traffic = update_traffic(problem, local.homes, piece, update.on)
            buffered += [(update, traffic.takes_compute)] if traffic.buffers else []
        if not piece.deferrable and update.due > count:
            wrong.append(f"{update}: the piece cannot be updated beside the next step")
        for name in piece.units:
            unit = problem.unit[name]
            first = min([*unit.uses, *unit.gradients, *(row.due for row in arrivals[name])], default=count)
            if update.due - count > first:
                wrong.append(f"{update}: unit {name!r} is used at boundary {first} of the next step, before the update")
            for row in arrivals[name]:
                if row.start < update.start - count:
                    wrong.append(f"{row}: it is issued before the update of {update.piece!r}, and would wait for it")
    dues = [update.due for update in local.updates]
    if local.updates and local.updates_done < max(dues):
        wrong.append(f"buffers of updates are free at boundary {local.updates_done}, and updates due at {max(dues)}")
    if local.updates and not max(dues) <= local.updates_done <= 2 * count:
        wrong.append(f"updates are done at boundary {local.updates_done}; accepted: {max(dues)} to {2 * count}")
    if buffered and local.update_buffers < 1:
        wrong.append("updates move pieces, and there is no buffer for one")
    starts = [update.start for update in local.updates]
    if starts != sorted(starts):
        wrong.append("updates are not in the order in which they start")
    if local.update_buffers:
        for (earlier, between), (later, _) in zip(buffered, buffered[local.update_buffers :], strict=False):
            if between and earlier.start < earlier.due and later.start < earlier.due:
                wrong.append(f"{later}: {local.update_buffers} buffers are in use until boundary {earlier.due}")
    return wrong
