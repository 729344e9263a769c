"""Plans from residencies: rows for all hops of what a planner wants on the device, and updates behind the last region."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from zinf_compile.errors import BudgetError
from zinf_compile.ir.sizes import CHUNK_BUFFERS
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Fetch, Gather, Homes, Kind, Local, Plan, Reduction, Shared, Store, Update
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Unit


@dataclasses.dataclass(frozen=True, slots=True)
class Stay:
    """What is on the device for regions due … until - 1, on its way from boundary `start` on."""

    name: str
    start: int
    due: int
    until: int


def farthest(problem: StepProblem) -> Homes:
    """Return homes as far away as is allowed: what needs the least memory."""
    allowed, tiers = problem.allowed, problem.tiers
    return Homes(
        params={unit.name: problem.param_tiers(unit.name)[-1] for unit in problem.units},
        grads={unit.name: (allowed.grads or tiers)[-1] for unit in problem.units if unit.trained},
        states={piece.name: (allowed.states or tiers)[-1] for piece in problem.pieces},
    )


def nearest(problem: StepProblem) -> Homes:
    """Return homes as near as is allowed: where all of it fits on the device, nothing moves but between ranks."""
    allowed, tiers = problem.allowed, problem.tiers
    return Homes(
        params={unit.name: problem.param_tiers(unit.name)[0] for unit in problem.units},
        grads={unit.name: (allowed.grads or tiers)[0] for unit in problem.units if unit.trained},
        states={piece.name: (allowed.states or tiers)[0] for piece in problem.pieces},
    )


def needs_stays(unit: Unit, home: Tier, device: Tier) -> bool:
    """Say whether something has to move before compute reads the unit."""
    return unit.is_gathered or home != device


def single_uses(unit: Unit) -> list[tuple[int, int]]:
    """Return (due, until) for each run of neighbouring regions that use a unit."""
    found: list[tuple[int, int]] = []
    for use in unit.uses:
        if found and found[-1][1] == use:
            found[-1] = (found[-1][0], use + 1)
        else:
            found.append((use, use + 1))
    return found


def build(
    problem: StepProblem,
    homes: Homes,
    stays: Iterable[Stay],
    *,
    planner: str,
    saved_stays: Iterable[Stay] = (),
    saved_stores: Iterable[Store] = (),
    reach: tuple[int, int] = (1, 1),
    buffers: int | None = None,
    updates: tuple[Update, ...] | None = None,
    done: int = 0,
) -> Plan:
    """Return the plan with these residencies. Updates run behind the last region if nothing else is said.

    `reach`: regions within which a gradient has left the device, and within which it has left the host for a drive. `done`: the
    boundary until which pieces may still be written, where the last update isn't due later.
    """
    fetches: list[Fetch] = []
    gathers: list[Gather] = []
    for stay in stays:
        unit = problem.unit[stay.name]
        if unit.is_gathered:
            gathers.append(Gather(stay.name, stay.start, stay.due, stay.until))
        end = stay.due + 1 if unit.is_gathered else stay.until
        fetches += _hops(problem, Kind.PARAM, stay, homes.params[stay.name], end)
    for stay in saved_stays:
        source = max((store.to for store in saved_stores if store.name == stay.name), key=problem.tiers.index)
        fetches += _hops(problem, Kind.SAVED, stay, source, stay.until)
    reductions, stores = _gradients(problem, homes, reach)
    places = {tier: number for number, tier in enumerate(problem.tiers)}
    fetches.sort(key=lambda row: (row.start, row.due, -places[row.to]))
    gathers.sort(key=lambda row: (row.start, row.due))
    if updates is None:
        updates = at_step(problem, homes)
    local = Local(
        homes=homes,
        fetches=tuple(fetches),
        stores=in_order(problem, [*saved_stores, *stores]),
        updates=updates,
        update_buffers=buffers if buffers is not None else (CHUNK_BUFFERS if updates else 0),
        updates_done=max((done, *(update.due for update in updates))) if updates else problem.count,
    )
    plan = Plan(shared=Shared(gathers=tuple(gathers), reductions=tuple(reductions)), local=local, planner=planner)
    if buffers is None and updates:
        while local.update_buffers > 1 and shortage(problem, plan):
            local = dataclasses.replace(local, update_buffers=local.update_buffers - 1)
            plan = dataclasses.replace(plan, local=local)
    return plan


def in_order(problem: StepProblem, stores: Iterable[Store]) -> tuple[Store, ...]:
    """Return stores in the order in which they are issued."""
    places = {tier: number for number, tier in enumerate(problem.tiers)}
    return tuple(sorted(stores, key=lambda row: (row.start, row.due, places[row.to])))


def _hops(problem: StepProblem, kind: Kind, stay: Stay, source: Tier, until: int) -> list[Fetch]:
    links = problem.hops(source, problem.device)
    found = []
    for link in links:
        assert link.source is not None
        assert link.destination is not None
        end = until if link is links[-1] else stay.due + 1
        found.append(Fetch(kind, stay.name, link.source, link.destination, stay.start, stay.due, end))
    return found


def _gradients(problem: StepProblem, homes: Homes, reach: tuple[int, int]) -> tuple[list[Reduction], list[Store]]:
    reductions, stores = [], []
    for unit in problem.units:
        if unit.reduced_at_step:
            reductions.append(Reduction(unit.name, unit.gradients, problem.count, problem.count))
            continue
        for region in unit.gradients:
            start = region + 1
            due = max(start, min(start + reach[0], problem.count))
            if unit.full_gradient_bytes:
                reductions.append(Reduction(unit.name, (region,), start, due))
            for link in problem.hops(problem.device, homes.grads[unit.name]):
                assert link.source is not None
                assert link.destination is not None
                left = due if link.source == problem.device else max(due, min(start + reach[1], problem.count))
                stores.append(Store(Kind.GRAD, unit.name, link.source, link.destination, start, left))
    return sorted(reductions, key=lambda row: (row.start, row.due)), stores


def at_step(problem: StepProblem, homes: Homes) -> tuple[Update, ...]:
    """Return updates of all pieces behind the last region, last used units first, each on the tier that moves less."""
    last = {unit.name: min(unit.uses, default=0) for unit in problem.units}
    order = sorted(problem.pieces, key=lambda piece: min(last[name] for name in piece.units))
    return tuple(
        Update(piece.name, update_tier(problem, homes.states[piece.name]), problem.count, problem.count) for piece in order
    )


def update_tier(problem: StepProblem, states: Tier) -> Tier:
    """Return where states that live on a tier are updated: there, or in host memory for drives."""
    wanted = states if states.in_memory else problem.host
    allowed = problem.allowed.update
    return wanted if not allowed or wanted in allowed else allowed[0]


def shortage(problem: StepProblem, plan: Plan) -> dict[Tier, int]:
    """Return the bytes by which a plan exceeds the room of each tier that it exceeds."""
    found = {}
    for tier, totals in occupied(problem, plan).items():
        over = int(totals.max()) - problem.room(tier)
        if over > 0:
            found[tier] = int(over)
    return found


def checked(problem: StepProblem, plan: Plan) -> Plan:
    """Return the plan; raise `BudgetError` if it needs more than there is."""
    if over := shortage(problem, plan):
        lines = in_words(over)
        raise BudgetError(f"planner {plan.planner!r} needs {lines} more than the budget; raise it, or take another planner")
    return plan


def in_words(over: Mapping[Tier, int]) -> str:
    """Return a `shortage` for messages."""
    return ", ".join(f"{count:,} bytes of {tier}" for tier, count in over.items())


def ahead_by(problem: StepProblem, homes: Homes, start_of: Mapping[tuple[str, int], int]) -> list[Stay]:
    """Return a stay for each run of uses of each unit that isn't there already, started where `start_of` (name, due) says."""
    return [
        Stay(unit.name, start_of.get((unit.name, due), due), due, until)
        for unit in problem.units
        if needs_stays(unit, homes.params[unit.name], problem.device)
        for due, until in single_uses(unit)
    ]
