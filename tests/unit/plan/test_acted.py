"""The plan that the backend acts out: transfers of each graph as it says, and what graphs leave to each other."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from plan_cases import training

from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan import verify_memory
from zinf_compile.plan.acted import Part, acted_plan
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Fetch, Gather, Kind, Local, Plan, Shared
from zinf_compile.plan.planners import just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed
from zinf_compile.plan.verify import verify

BLOCKS = 4


def problem_of_graphs() -> StepProblem:
    """Return a step of two micro-batches whose regions and saved values are named as graphs name them."""
    problem = training(1, BLOCKS, tiers=3, micro_batches=2, device=1.0, host=1.0)
    regions = tuple(dataclasses.replace(region, graph=f"{region.structure} 0") for region in problem.regions)
    values = []
    for value in problem.saved:
        batch, block = divmod(value.made_in, 2 * BLOCKS)
        name = f"relu_{block} of forward 0, micro-batch {batch}"
        values.append(dataclasses.replace(value, name=name, remade_by=(), remade_from=(), choices=()))
    return dataclasses.replace(problem, regions=regions, saved=tuple(values))


def memory(block: int, tier: Tier, lag: int, lead: int) -> SavedMemory:
    return SavedMemory(name=f"relu_{block}", outputs=(block,), inputs=(f"relu_{block}",), bytes=1, tier=tier, lag=lag, lead=lead)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize(("lag", "lead"), [(1, 1), (2, 3), (9, 9)])
def test_saved_values_leave_and_come_back_as_their_graph_says(tier: Tier, lag: int, lead: int) -> None:
    problem = problem_of_graphs()
    saved = {f"relu_{block} of forward 0": memory(block, tier, lag, lead) for block in (0, 2)}
    plain = just_in_time(problem)
    found = acted_plan(problem, (), plain.local.homes, saved=saved).local
    stores = [row for row in found.stores if row.kind is Kind.SAVED]
    hops = len(problem.hops(problem.device, tier))
    moved = {value.name: value for value in problem.saved if value.name.partition(", ")[0] in saved}
    assert {row.name for row in stores} == {row.name for row in found.fetches} == moved.keys()
    assert len(moved) == 4, "two of each micro-batch"
    assert len(stores) == len(found.fetches) == 4 * hops
    for row in stores:
        value = moved[row.name]
        batch = value.made_in // (2 * BLOCKS)
        assert value.made_in < row.start <= row.due <= (2 * batch + 1) * BLOCKS, "before its forward ends"
        if row.source == problem.device:
            assert row.due == min(row.start + lag, (2 * batch + 1) * BLOCKS)
    for fetch in found.fetches:
        value = moved[fetch.name]
        begins = (2 * (value.made_in // (2 * BLOCKS)) + 1) * BLOCKS
        assert fetch.due == min(used for used in value.used_in if used >= begins)
        assert fetch.start == max(begins, fetch.due - lead - hops + 1), "not before its backward begins"
    local = dataclasses.replace(
        plain.local, fetches=(*found.fetches, *plain.local.fetches), stores=(*stores, *plain.local.stores)
    )
    assert verify(problem, dataclasses.replace(plain, local=local)) == []


def test_what_no_backward_reads_stays() -> None:
    problem = problem_of_graphs()
    unused = dataclasses.replace(problem, saved=tuple(dataclasses.replace(value, used_in=()) for value in problem.saved))
    homes = just_in_time(unused).local.homes
    saved = {"relu_0 of forward 0": memory(0, Tier.HOST, 1, 1)}
    assert not [row for row in acted_plan(unused, (), homes, saved=saved).local.stores if row.kind is Kind.SAVED]


def gradients_of(local: Local) -> list[tuple[str, int, int]]:
    return [(row.name, row.start, row.due) for row in local.stores if row.kind is Kind.GRAD]


@pytest.mark.parametrize("in_flight", [None, 10, 700, 10**6])
def test_compute_waits_for_gradients_where_more_would_be_under_way_at_once(in_flight: int | None) -> None:
    problem = training(1, BLOCKS, tiers=2, even=True, device=1.0, host=1.0)  # each gradient has 400 bytes
    homes = just_in_time(problem).local.homes
    found = gradients_of(acted_plan(problem, (), homes, in_flight=in_flight).local)
    starts = [BLOCKS + 1 + block for block in range(BLOCKS)]
    dues = {
        None: [start + 1 for start in starts[:-1]] + starts[-1:],
        10: [*starts[1:], 2 * BLOCKS],
        700: [*starts[1:], 2 * BLOCKS],
        10**6: [2 * BLOCKS] * BLOCKS,
    }
    assert found == [
        (f"w{BLOCKS - 1 - n}", start, due) for n, (start, due) in enumerate(zip(starts, dues[in_flight], strict=True))
    ]


@pytest.mark.parametrize("in_flight", [None, 800, 10**6])
def test_reduced_gradients_leave_beside_compute_as_others_do(in_flight: int | None) -> None:
    problem = training(1, BLOCKS, tiers=2, even=True, device=1.0, host=1.0, world=2)
    one = problem.units[0]
    assert (one.full_gradient_bytes, one.gradient_bytes) == (400, 200)
    found = gradients_of(acted_plan(problem, (), just_in_time(problem).local.homes, in_flight=in_flight).local)
    starts = [BLOCKS + 1 + block for block in range(BLOCKS)]
    last = 2 * BLOCKS
    dues = {
        None: [start + 1 for start in starts[:-1]] + starts[-1:],
        800: [starts[2], starts[3], last, last],  # the full one of the next, and its shard, beside one shard
        10**6: [last] * BLOCKS,
    }
    assert [due for _, _, due in found] == dues[in_flight]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_step_begins_beside_the_last_gradients(world_size: int) -> None:
    problem = training(1, BLOCKS, tiers=2, even=True, device=1.0, host=1.0, world=world_size)
    homes = just_in_time(problem).local.homes
    plan = acted_plan(problem, graph_plans(problem, gathered=world_size > 1), homes, in_flight=10**6, defers=True)
    dues = {due for _, _, due in gradients_of(plan.local)}
    assert max(dues) == 2 * BLOCKS + 1
    assert verify(problem, plan) == []
    held, occ = verify_memory.held(problem, plan), occupied(problem, plan)
    assert all((held[tier] == occ[tier]).all() for tier in problem.tiers)


def graph_plans(problem: StepProblem, *, gathered: bool = False, path: tuple[Tier, ...] = (Tier.HOST, Tier.DEVICE)) -> list[Part]:
    """Return a forward and a backward as parts, each unit fetched just in time in each, and gathered."""
    parts = []
    for first in range(0, problem.count, BLOCKS):
        uses = [(unit.name, use - first) for unit in problem.units for use in unit.uses if first <= use < first + BLOCKS]
        uses.sort(key=lambda row: row[1])
        rows = [
            Fetch(Kind.PARAM, name, source, to, use, use, use + 1)
            for name, use in uses
            for source, to in itertools.pairwise(path)
        ]
        shared = Shared(gathers=tuple(Gather(name, use, use, use + 1) for name, use in uses) if gathered else ())
        parts.append(
            Part(
                Plan(shared=shared, local=Local(fetches=tuple(rows))), first, {unit.name: (unit.name,) for unit in problem.units}
            )
        )
    return parts


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_backward_takes_what_its_forward_has_at_its_end(micro_batches: int) -> None:
    """The last block's unit is fetched once for both, and that of the first one for each: a step is in between."""
    problem = training(1, BLOCKS, tiers=2, micro_batches=micro_batches, device=1.0, host=1.0)
    problem = dataclasses.replace(problem, allowed=Allowed(params=(Tier.HOST,), grads=(Tier.HOST,), states=(Tier.HOST,)))
    regions = tuple(dataclasses.replace(region, graph=f"{region.structure} 0") for region in problem.regions)
    problem = dataclasses.replace(problem, regions=regions)
    plan = acted_plan(problem, graph_plans(problem), just_in_time(problem).local.homes)
    fetches = [(row.name, row.due, row.until) for row in plan.local.fetches if row.kind is Kind.PARAM]
    for batch in range(micro_batches):
        border = (2 * batch + 1) * BLOCKS
        last = [row for row in fetches if row[0] == f"w{BLOCKS - 1}" and border - BLOCKS <= row[1] < border + BLOCKS]
        assert last == [(f"w{BLOCKS - 1}", border - 1, border + 1)]
    assert len(fetches) == micro_batches * (2 * BLOCKS - 1)
    assert verify(problem, plan) == []


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_backward_of_several_ranks_finds_the_shards_that_were_left(micro_batches: int) -> None:
    """They are fetched once for both, and gathered for each; all others are fetched for each."""
    problem = training(1, BLOCKS, tiers=3, world=2, micro_batches=micro_batches, device=1.0, host=1.0)
    regions = tuple(dataclasses.replace(region, graph=f"{region.structure} 0") for region in problem.regions)
    problem = dataclasses.replace(problem, regions=regions, allowed=Allowed(params=(Tier.NVME,)))
    found = [f"w{BLOCKS - 1}", f"w{BLOCKS - 2}"]
    parts = [
        Part(part.plan, part.first, part.units, finds=found if number % 2 else ())
        for number, part in enumerate(graph_plans(problem, gathered=True, path=(Tier.NVME, Tier.HOST, Tier.DEVICE)))
    ]
    plan = acted_plan(problem, parts, just_in_time(problem).local.homes)
    rows = [row for row in plan.local.fetches if row.kind is Kind.PARAM]
    for batch in range(micro_batches):
        begin, border = 2 * BLOCKS * batch, 2 * BLOCKS * batch + BLOCKS
        for name in found:
            block = int(name[1:])
            own = [row for row in rows if row.name == name and begin <= row.due < begin + 2 * BLOCKS]
            assert [(row.to, row.due) for row in own] == [(Tier.HOST, begin + block), (Tier.DEVICE, begin + block)]
            assert own[-1].until == border + BLOCKS - block, "until the backward has gathered it"
    assert len(rows) == 2 * micro_batches * (2 * BLOCKS - len(found))
    assert len(plan.shared.gathers) == micro_batches * 2 * BLOCKS
    assert verify(problem, plan) == []


def test_the_backward_of_another_graph_takes_nothing() -> None:
    problem = training(1, BLOCKS, tiers=2, device=1.0, host=1.0)
    names = ["forward 0"] * BLOCKS + ["backward 1"] * BLOCKS
    regions = tuple(dataclasses.replace(region, graph=name) for region, name in zip(problem.regions, names, strict=True))
    problem = dataclasses.replace(problem, regions=regions)
    homes = just_in_time(dataclasses.replace(problem, allowed=Allowed(params=(Tier.HOST,)))).local.homes
    assert len(acted_plan(problem, graph_plans(problem), homes).local.fetches) == 2 * BLOCKS


def test_units_are_fetched_before_saved_values_that_start_with_them() -> None:
    """As graphs issue them: a link takes them in this order."""
    problem = problem_of_graphs()
    saved = {f"relu_{block} of forward 0": memory(block, Tier.HOST, 1, 9) for block in (0, 2)}
    kinds = [
        row.kind
        for row in acted_plan(problem, graph_plans(problem), just_in_time(problem).local.homes, saved=saved).local.fetches
    ]
    assert kinds == sorted(kinds, key=[Kind.PARAM, Kind.SAVED].index)
    assert {*kinds} == {Kind.PARAM, Kind.SAVED}


def test_a_step_defers_what_the_host_updates_and_nothing_that_the_device_does() -> None:
    """Where states are partly here, partly there."""
    problem = training(1, BLOCKS, tiers=2, even=True, device=1.0, host=1.0)
    homes = just_in_time(problem).local.homes
    near = [name for number, name in enumerate(homes.states) if number % 2]
    mixed = dataclasses.replace(homes, states={**homes.states, **dict.fromkeys(near, Tier.DEVICE)})
    found = {row.piece: row for row in acted_plan(problem, (), mixed, defers=True).local.updates}
    count = problem.count
    assert {found[name].due for name in near} == {count}
    assert all(found[name].on == Tier.DEVICE for name in near)
    assert any(row.due > count for name, row in found.items() if name not in near)
