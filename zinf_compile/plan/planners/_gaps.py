"""The gaps of a problem with given homes: what may stay on the device between two uses, and the memory that is free for it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Homes, Kind, Plan, Reduction, Store
from zinf_compile.plan.problem import StepProblem, gaps
from zinf_compile.plan.problem_parts import KEEP, SavedValue, Unit

from ._build import needs_stays
from ._walk import Gap, Load, Walk

UNIT, SAVED = "unit ", "saved "
"""What the keys of gaps begin with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gaps:
    """A walk, its gaps, and what they are gaps of."""

    walk: Walk
    gaps: list[Gap]


def find_gaps(
    problem: StepProblem,
    homes: Homes,
    base: Plan,
    *,
    fixed: Collection[str] = (),
    far_saved: bool = False,
    waits: bool = True,
) -> Gaps:
    """Return the gaps of units and saved values. `base` moves all units just in time, and keeps all saved values.

    `fixed`: saved values that the caller decides about. `far_saved`: the others leave as far as they may. `waits` as in
    `Walk`.
    """
    memories = [tier for tier in problem.tiers if tier.in_memory]
    lanes = {name: number for number, name in enumerate(dict.fromkeys(link.on_lane for link in problem.links))}
    taken = occupied(problem, base)
    found: list[Gap] = []
    starts: dict[str, int] = {}
    for update in base.local.updates:
        for name in problem.piece[update.piece].units:
            starts[name] = max(update.start, starts.get(name, 0))
    for unit in problem.units:
        if needs_stays(unit, homes.params[unit.name], problem.device):
            found += _of_unit(problem, unit, homes.params[unit.name], memories, lanes, starts)
    seconds = [region.seconds for region in problem.regions]
    walk = Walk(
        seconds,
        [problem.room(tier) for tier in memories],
        [taken[tier] for tier in memories],
        len(lanes),
        _loads(problem, base, lanes),
        waits=waits,
    )
    for value in problem.saved:
        if value.name not in fixed and (gap := _of_saved(problem, value, memories, lanes, far=far_saved)) is not None:
            found.append(gap)
            walk.take(walk.base[0], value.bytes, gap.last + 1, gap.next)  # `base` has it; `take` subtracts
    for memory, room in enumerate(walk.rooms):
        walk.free[memory] = room - walk.base[memory]
    return Gaps(walk, found)


def _loads(problem: StepProblem, base: Plan, lanes: dict[str, int]) -> list[Load]:
    """Return what gradients pass on their way home."""
    rows: dict[str, list[list[Reduction | Store]]] = defaultdict(list)
    for reduction in base.shared.reductions:
        rows[reduction.unit].append([reduction])
    passed: dict[tuple[str, str], int] = defaultdict(int)
    for store in sorted(base.local.stores, key=lambda row: problem.tiers.index(row.to)):
        if store.kind is Kind.GRAD:
            own, number = rows[store.name], passed[store.name, store.to]
            passed[store.name, store.to] += 1
            if number == len(own):
                own.append([])
            own[number].append(store)
    found = []
    for name, chains in rows.items():
        unit = problem.unit[name]
        for chain in chains:
            path = []
            for row in chain:
                if isinstance(row, Reduction):
                    link, size = problem.link(problem.device, None), unit.reduced_bytes
                else:
                    link, size = problem.link(row.source, row.to), unit.gradient_bytes
                path.append((lanes[link.on_lane], link.seconds(size), row.due))
            found.append(Load(chain[0].start, tuple(path)))
    return sorted(found, key=lambda load: load.start)


def _of_unit(
    problem: StepProblem, unit: Unit, home: Tier, memories: list[Tier], lanes: dict[str, int], starts: dict[str, int]
) -> list[Gap]:
    device, count = problem.device, problem.count
    path = [(lanes[link.on_lane], link.seconds(unit.stored_bytes)) for link in problem.hops(home, device)]
    moving = dict.fromkeys(memories, 0)
    for link in problem.hops(home, device):
        assert link.destination is not None
        moving[link.destination] += unit.stored_bytes
    if unit.is_gathered:
        moving[device] += unit.full_bytes
        if problem.world_size > 1:
            gather = problem.link(None, device)
            path.append((lanes[gather.on_lane], gather.seconds(unit.wire_bytes)))
    kept = [0] * len(memories)
    kept[0] = unit.full_bytes or unit.stored_bytes
    found = []
    for last, after in gaps(unit.uses, problem.count, cyclic=True):
        crossing = after >= problem.count
        if after == last + 1 and not crossing:
            continue
        found.append(
            Gap(
                key=UNIT + unit.name,
                last=last,
                next=after,
                kept=tuple(kept),
                moving=tuple(moving[tier] for tier in memories),
                path=tuple(path),
                earliest=starts.get(unit.name, count) if crossing and unit.trained else last + 1,
                may_stay=not (crossing and unit.trained),
            )
        )
    return found


def _of_saved(problem: StepProblem, value: SavedValue, memories: list[Tier], lanes: dict[str, int], *, far: bool) -> Gap | None:
    """Return the longest gap of a saved value, if it may leave; it stays in the others."""
    tier = away(problem, value, far=far)
    if tier is None or not value.used_in:
        return None
    last, after = max(gaps((value.made_in, *value.used_in), problem.count, cyclic=False), key=lambda gap: gap[1] - gap[0])
    if after <= last + 1:
        return None
    out, back = problem.hops(problem.device, tier), problem.hops(tier, problem.device)
    passed = [problem.device, *(link.destination for link in out if link.destination in memories)]
    through = passed if not tier.in_memory else passed[:1]
    size = value.bytes
    return Gap(
        key=SAVED + value.name,
        last=last,
        next=after,
        kept=(size, *(0 for _ in memories[1:])),
        moving=tuple(size if each in through else 0 for each in memories),
        path=tuple((lanes[link.on_lane], link.seconds(size)) for link in back),
        leaves=tuple((lanes[link.on_lane], link.seconds(size)) for link in out),
        leaving=tuple(size if each in through else 0 for each in memories),
        beyond=tuple(size if each == tier else 0 for each in memories),
        may_stay=not value.choices or KEEP in value.choices,
    )


def away(problem: StepProblem, value: SavedValue, *, far: bool = False) -> Tier | None:
    """Return the nearest tier to which a saved value may be offloaded, or the farthest."""
    tiers = problem.tiers[:0:-1] if far else problem.tiers[1:]
    return next((tier for tier in tiers if not value.choices or tier in value.choices), None)
