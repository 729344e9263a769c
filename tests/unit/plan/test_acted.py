"""The plan that the backend acts out, of a step whose saved values leave the device as each forward's graph says."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import training

from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.acted import acted_plan
from zinf_compile.plan.plan import Kind
from zinf_compile.plan.planners import just_in_time
from zinf_compile.plan.problem import StepProblem
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
