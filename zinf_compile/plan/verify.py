"""Whether a plan is legal, read from its rows alone: it shares nothing with planners, with `occupancy` or with `simulate`.

What a plan must fulfil: everything that a region uses is there, due before; every transfer finds its source; all memory fits at
every moment; each thing has one home; each gradient is reduced and brought home once; each piece of states is updated once, after
its gradients and before its units' next use.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from zinf_compile.errors import PlanError
from zinf_compile.ir.tiers import Tier

from .plan import Fetch, Gather, Kind, Plan, Reduction, Store
from .problem import StepProblem
from .problem_parts import KEEP, RECOMPUTE
from .verify_memory import held, over_room
from .verify_updates import check_gradients, check_updates

NAMED = 6
"""Sentences of an error; more are counted."""


def check(problem: StepProblem, plan: Plan, *, planner: str | None = None) -> None:
    """Raise `PlanError` with what is wrong; with the first of it, and how much more there is, where it is much.

    `planner`: who has returned the plan; one of the user's own may have changed another planner's.
    """
    if not (wrong := verify(problem, plan)):
        return
    said = "; ".join(wrong[:NAMED]) + (f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else "")
    units = plan.local.homes.params.keys()
    if units - problem.unit.keys() and problem.unit.keys() - units:
        said += ". It was made for another model or other options: units have other names"
    raise PlanError(f"plan {planner or plan.planner or 'by hand'} is illegal: {said}")


def verify(problem: StepProblem, plan: Plan) -> list[str]:
    """Return what is wrong, one sentence each; nothing for a legal plan."""
    if wrong := [*_names(problem, plan), *_rows(problem, plan)]:
        return wrong  # the other checks look things up
    wrong = [
        *_units(problem, plan),
        *_saved(problem, plan),
        *_sources(problem, plan),
        *check_gradients(problem, plan),
        *check_updates(problem, plan),
    ]
    return wrong or list(over_room(problem, held(problem, plan)))


def _names(problem: StepProblem, plan: Plan) -> list[str]:
    homes, allowed, wrong = plan.local.homes, problem.allowed, []
    trained = {unit.name for unit in problem.units if unit.trained}
    for what, field, table, names, tiers in (
        ("parameter", "params", homes.params, problem.unit.keys(), allowed.params),
        ("gradient", "grads", homes.grads, trained, allowed.grads),
        ("states", "states", homes.states, problem.piece.keys(), allowed.states),
    ):
        wrong += [f"{what} {name!r} has no home in Homes.{field}" for name in sorted(names - table.keys())]
        wrong += [f"{what} {name!r} has a home, but the problem has no such thing" for name in sorted(table.keys() - names)]
        for name, tier in table.items():
            if tier not in problem.tiers:
                wrong.append(f"{what} {name!r} lives on {tier}, which is no tier of the problem: {', '.join(problem.tiers)}")
            elif tiers and tier not in tiers:
                wrong.append(f"{what} {name!r} lives on {tier}; the user allows {', '.join(tiers)}")
    for unit in problem.units:
        if unit.home not in (None, homes.params.get(unit.name)):
            wrong.append(f"parameter {unit.name!r} lives on {homes.params.get(unit.name)} in the plan; it does on {unit.home}")
    wrong += [f"{row}: no unit {row.unit!r}" for row in plan.shared.gathers if row.unit not in problem.unit]
    wrong += [f"{row}: no unit {row.unit!r}" for row in plan.shared.reductions if row.unit not in problem.unit]
    wrong += [f"unit {name!r} stays gathered, but is no unit" for name in plan.shared.resident if name not in problem.unit]
    hops: list[Fetch | Store] = [*plan.local.fetches, *plan.local.stores]
    for moved in hops:
        known: Collection[str] = (
            problem.value if moved.kind is Kind.SAVED else trained if moved.kind is Kind.GRAD else problem.unit
        )
        if moved.name not in known:
            wrong.append(f"{moved}: the problem has no such thing")
    wrong += [f"{row}: no piece {row.piece!r}" for row in plan.local.updates if row.piece not in problem.piece]
    wrong += [
        f"{row}: no saved value {name!r}" for row in plan.shared.remakes for name in row.values if name not in problem.value
    ]
    for piece in problem.pieces:
        for table in (homes.params, homes.grads):
            if len({table.get(name) for name in piece.units}) > 1:
                wrong.append(f"the units of piece {piece.name!r} have several homes: {', '.join(piece.units)}")
    return wrong


def _rows(problem: StepProblem, plan: Plan) -> list[str]:
    wrong, count, tiers = [], problem.count, problem.tiers
    copies: list[Gather | Fetch] = [*plan.shared.gathers, *plan.local.fetches]
    leaving: list[Reduction | Store] = [*plan.shared.reductions, *plan.local.stores]
    hops: list[Fetch | Store] = [*plan.local.fetches, *plan.local.stores]
    for row in copies:
        if not -count <= row.start <= row.due <= row.until or not 0 <= row.due < count:
            wrong.append(f"{row}: boundaries are out of order")
        elif row.until > row.start + count:
            wrong.append(f"{row}: it is still there when the next step's copy begins to arrive")
    for left in leaving:
        late = isinstance(left, Store) and left.kind is Kind.GRAD and left.to.in_memory  # while the next step's units arrive
        if not 0 <= left.start <= left.due <= count + late:
            wrong.append(f"{left}: boundaries are out of order")
    for hop in hops:
        ends = [tiers.index(end) if end in tiers else -9 for end in (hop.source, hop.to)]
        if ends[1] - ends[0] != (-1 if isinstance(hop, Fetch) else 1):
            wrong.append(f"{hop}: it is no hop to a {'nearer' if isinstance(hop, Fetch) else 'farther'} neighbour")
    for name in [name for name, uses in Counter(plan.shared.resident).items() if uses > 1]:
        wrong.append(f"unit {name!r} stays gathered twice")
    for remake in plan.shared.remakes:
        if not 0 <= remake.before < count or any(not 0 <= region < count for region in remake.regions):
            wrong.append(f"{remake}: no such region")
    return wrong


def _there(count: int, spans: list[tuple[int, int]], region: int) -> bool:
    """Say whether a region lies in one of the spans [due, until), in this step or the next one."""
    return any(start <= region < end or start <= region + count < end for start, end in spans)


def _units(problem: StepProblem, plan: Plan) -> list[str]:
    """Each use finds the full unit on the device."""
    wrong, count, device = [], problem.count, problem.device
    gathered: dict[str, list[Gather]] = defaultdict(list)
    fetched: dict[str, list[Fetch]] = defaultdict(list)
    for gather in plan.shared.gathers:
        gathered[gather.unit].append(gather)
    for fetch in plan.local.fetches:
        if fetch.kind is Kind.PARAM:
            fetched[fetch.name].append(fetch)
    again: dict[int, set[int]] = defaultdict(set)
    for remake in plan.shared.remakes:
        again[remake.before].update(remake.regions)
    resident = set(plan.shared.resident)
    for unit in problem.units:
        own, brought = gathered[unit.name], fetched[unit.name]
        if unit.name in resident and (unit.trained or not unit.is_gathered or own):
            why = "is trained" if unit.trained else "is gathered in each step" if own else "is not gathered"
            wrong.append(f"unit {unit.name!r} stays gathered, but {why}")
        if own and not unit.is_gathered:
            wrong.append(f"{own[0]}: compute reads the shard itself")
        if unit.name in resident or (not unit.is_gathered and plan.local.homes.params[unit.name] == device):
            if brought and not unit.is_gathered:
                wrong.append(f"{brought[0]}: it has two places on {device}, it lives there")
            continue
        rows: Sequence[Gather | Fetch] = own if unit.is_gathered else [fetch for fetch in brought if fetch.to == device]
        spans = [(row.due, row.until) for row in rows]
        uses = {*unit.uses, *(before for before, regions in again.items() if regions.intersection(unit.uses))}
        for use in sorted(uses):
            if not _there(count, spans, use):
                near = min((row.due for row in rows if row.due > use), default=None)
                late = f"; the next one is due at {near}, too late" if near is not None else ""
                wrong.append(f"region {use} uses unit {unit.name!r}, which is not on {device} then{late}")
        for one, other in _overlaps(count, [(row.start, row.until) for row in rows]):
            wrong.append(f"unit {unit.name!r} is brought to {device} twice at once: from {one} and from {other}")
        if unit.trained:
            copies: list[Gather | Fetch] = [*own, *brought]
            for row in copies:
                if row.start < 0 or row.until > count:
                    wrong.append(f"{row}: the copy lasts over an update of the unit, and would be the old one")
    return wrong


def _overlaps(count: int, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found = []
    for number, one in enumerate(spans):
        for other in spans[number + 1 :]:
            if any(max(one[0], other[0] + shift) < min(one[1], other[1] + shift) for shift in (-count, 0, count)):
                found.append((one[0], other[0]))
    return found


def _sources(problem: StepProblem, plan: Plan) -> list[str]:
    """Each fetch and each gather finds what it takes, until it is done."""
    wrong, count, device = [], problem.count, problem.device
    copies: dict[tuple[Kind, str, Tier], list[tuple[int, int]]] = defaultdict(list)
    for fetch in plan.local.fetches:
        copies[fetch.kind, fetch.name, fetch.to].append((fetch.start, fetch.until))
    stored: dict[tuple[str, Tier], list[Store]] = defaultdict(list)
    for store in plan.local.stores:
        if store.kind is Kind.SAVED:
            stored[store.name, store.to].append(store)

    def covered(kind: Kind, name: str, tier: Tier, start: int, due: int) -> bool:
        spans = copies[kind, name, tier]
        return any(a + shift <= start and due < b + shift for a, b in spans for shift in (-count, 0, count))

    homes = plan.local.homes.params
    for gather in plan.shared.gathers:
        if homes[gather.unit] != device and not covered(Kind.PARAM, gather.unit, device, gather.start, gather.due):
            wrong.append(
                f"{gather}: the shard lives on {homes[gather.unit]}, and no copy is on {device} until the gather is done"
            )
    for fetch in plan.local.fetches:
        if fetch.kind is Kind.PARAM:
            if homes[fetch.name] != fetch.source and not covered(fetch.kind, fetch.name, fetch.source, fetch.start, fetch.due):
                wrong.append(
                    f"{fetch}: the shard lives on {homes[fetch.name]}, and no copy is on {fetch.source} until it is fetched"
                )
        elif fetch.kind is Kind.GRAD:
            wrong.append(f"{fetch}: gradients are fetched by the update")
        else:
            earlier = [store for store in stored[fetch.name, fetch.source] if store.start <= fetch.start]
            if not earlier and not covered(fetch.kind, fetch.name, fetch.source, fetch.start, fetch.due):
                wrong.append(f"{fetch}: nothing stored the value on {fetch.source} before")
    return wrong


def _saved(problem: StepProblem, plan: Plan) -> list[str]:
    """Each use finds the saved value on the device, and it became of it what may."""
    wrong, device = [], problem.device
    stores: dict[str, list[Store]] = defaultdict(list)
    fetched: dict[str, list[Fetch]] = defaultdict(list)
    for store in plan.local.stores:
        if store.kind is Kind.SAVED:
            stores[store.name].append(store)
    for fetch in plan.local.fetches:
        if fetch.kind is Kind.SAVED:
            fetched[fetch.name].append(fetch)
    remakes: dict[str, list[int]] = defaultdict(list)
    for remake in plan.shared.remakes:
        for name in remake.values:
            remakes[name].append(remake.before)
            value = problem.value[name]
            if tuple(remake.regions) != value.remade_by:
                wrong.append(f"{remake}: {name!r} is made again by regions {value.remade_by}")
    spans: dict[str, list[tuple[int, int]]] = {}
    for value in problem.saved:
        own, again = stores[value.name], remakes[value.name]
        leaving = [store for store in own if store.source == device]
        last = max((value.made_in, *value.used_in)) + 1
        if len(leaving) > 1 or len(again) > 1 or (leaving and again):
            wrong.append(f"saved value {value.name!r} leaves {device} more than once in a step")
        gone = leaving[0].due if leaving else last
        if again:
            gone = max((use for use in (value.made_in, *value.used_in) if use < again[0]), default=value.made_in) + 1
        here = [(value.made_in, gone), *((fetch.due, fetch.until) for fetch in fetched[value.name] if fetch.to == device)]
        here += [(again[0], last)] if again else []
        spans[value.name] = here
        chosen = {store.to for store in own if not any(other.source == store.to for other in own)} | (
            {RECOMPUTE} if again else set()
        )
        for choice in chosen or {KEEP}:
            if value.choices and choice not in value.choices:
                wrong.append(f"saved value {value.name!r}: {choice}; accepted: {', '.join(value.choices)}")
        for store in leaving:
            if store.start <= value.made_in:
                wrong.append(f"{store}: the value is made in region {value.made_in}")
        for store in own:
            if store.source != device and not any(other.to == store.source and other.start <= store.start for other in own):
                wrong.append(f"{store}: nothing stored the value on {store.source} before")
        for use in value.used_in:
            if not any(start <= use < end for start, end in here):
                wrong.append(f"region {use} uses saved value {value.name!r}, which is not on {device} then")
    for remake in plan.shared.remakes:
        for name in {source for value in remake.values for source in problem.value[value].remade_from}:
            if not any(start <= remake.before < end for start, end in spans.get(name, ())) and name not in remake.values:
                wrong.append(f"{remake}: it reads saved value {name!r}, which is not on {device} then")
    return wrong
