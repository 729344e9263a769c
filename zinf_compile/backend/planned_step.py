"""The problem of a step that was recorded, and the plan that it acted out: what `simulate` predicts it by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from zinf_compile.errors import PlanError
from zinf_compile.ir.placements import KINDS
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.optim.deferrable import may_defer
from zinf_compile.passes.analysis.saved_values import moved_values
from zinf_compile.passes.analysis.step_problem import Pair, problem_of_runs, unit_members
from zinf_compile.passes.analysis.step_regions import find_regions
from zinf_compile.plan.acted import Part, acted_plan
from zinf_compile.plan.costs import Costs
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Homes, Plan
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import Timeline, simulate
from zinf_compile.runtime.lanes.step_recorder import StepRecord
from zinf_compile.runtime.memory.rank_memory import Memory

from .kept_graphs import KeptGraph, kept_graph
from .measured_costs import link_costs, run_seconds, update_seconds
from .states_kept import states_of_optimizers


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step as it was planned."""

    problem: StepProblem
    plan: Plan
    timeline: Timeline


def planned_step(programs: Sequence[str], *, memory: Memory, record: StepRecord | None = None) -> PlannedStep:
    """Return the prediction of a step that runs these programs in order, at the costs known by now, or at those of a `record`.

    The caps of this rank's `memory` are the budgets of the problem. Raises `PlanError` where a program was not planned.
    """
    runs = [_kept(name) for name in programs]
    if not runs:
        raise PlanError("no graph ran in the step")
    pairs: list[Pair] = []
    places: dict[str, int] = {}
    order: list[tuple[int, bool]] = []
    saved: dict[str, SavedMemory] = {}
    for kept in runs:
        kind, _, number = kept.name.partition(" of ")
        if number not in places:
            places[number] = len(pairs)
            backward = kept_graph(f"backward of {number}")
            forward = kept_graph(f"forward of {number}") or kept_graph(f"inference of {number}") or kept
            pairs.append((forward.gm.graph, None if backward is None else backward.gm.graph))
        order.append((places[number], kind == "backward"))
        if kind == "forward":
            saved |= moved_values(kept.gm, f"forward {places[number]}")
    away = {memory.tier for memory in saved.values()}
    planner = runs[0].planner
    states = states_of_optimizers()
    topology = planner.topology
    placed = {slot.name: kept.planner.placements.of(slot) for kept in runs for slots in kept.members.values() for slot in slots}

    def home(slot: ParameterSlot, kind: str = "params") -> Tier:
        return next(iter(topology.hops(getattr(placed[slot.name], kind))), Tier.DEVICE)

    def homes_of(slot: ParameterSlot) -> tuple[Tier, ...]:
        return tuple(home(slot, kind) for kind in KINDS)

    facts = planner.facts(only_params=False, states=states, home=home, saved=away)
    facts = dataclasses.replace(facts, apart=homes_of, saved_choices=())  # the bound is that of all plans
    problem = problem_of_runs(pairs, order, facts, name="recorded step")
    if record is None:
        problem = planner.costs.of_updates(problem)
    else:
        own = Costs(links=link_costs([record], planner.assumed_links(away)), update_seconds=update_seconds([record]))
        times = run_seconds(record)
        counts = [find_regions(kept.gm.graph).count for kept in runs]
        seconds = [times.get((run, n), 0.0) for run, count in enumerate(counts) for n in range(count)]
        problem = own.of_updates(own.of_regions(problem, seconds))
    members = unit_members(list(dict.fromkeys(kept.gm.graph for kept in runs)), home, apart=homes_of)
    unit_of = {slot.name: name for name, slots in members.items() if name in problem.unit for slot in slots}
    parts, first = [], 0
    for kept in runs:
        units = {
            name: tuple(dict.fromkeys(unit_of[slot.name] for slot in slots if slot.name in unit_of))
            for name, slots in kept.members.items()
        }
        parts.append(Part(kept.plan, first, units, kept.handed if kept.is_backward else ()))
        first += find_regions(kept.gm.graph).count
    homes = Homes(
        params={unit.name: home(members[unit.name][0]) for unit in problem.units},
        grads={unit.name: home(members[unit.name][0], "grads") for unit in problem.units if unit.trained},
        states={piece.name: home(members[piece.units[0]][0], "optimizer") for piece in problem.pieces},
    )
    placement = planner.placements.rest
    defers = bool(problem.pieces) and may_defer(placement, [{"states": next(iter(problem.pieces))}], topology)  # type: ignore[dict-item]
    plan = acted_plan(problem, parts, homes, saved=saved, defers=defers, in_flight=memory.inflight_gradients.limit)
    problem = _within(problem, plan, {Tier.DEVICE: memory.reservations.device_cap, Tier.HOST: memory.reservations.host_cap})
    return PlannedStep(problem, plan, simulate(problem, plan))


def _within(problem: StepProblem, plan: Plan, caps: Mapping[Tier, int | None]) -> StepProblem:
    """Return the problem with the caps as budgets, or what the plan takes where the account of its regions is above that."""
    taken = {tier: int(held.max()) for tier, held in occupied(problem, plan).items()}
    return problem.with_budgets(
        **{tier: max(cap, taken[tier]) for tier, cap in caps.items() if cap is not None and tier in taken}
    )


def _kept(name: str) -> KeptGraph:
    kept = kept_graph(name)
    if kept is None:
        raise PlanError(f"the {name} was not planned: option planner says by which planner")
    return kept
