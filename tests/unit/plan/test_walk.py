"""The walk by which the default planner judges what stays: it predicts the step that `simulate` predicts of its plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from plan_cases import training

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Kind
from zinf_compile.plan.planners import cached_prefetch, just_in_time
from zinf_compile.plan.planners._build import ahead_by, build, farthest
from zinf_compile.plan.planners._from_walk import moved_by
from zinf_compile.plan.planners._gaps import find_gaps
from zinf_compile.plan.planners._residency import best_walk
from zinf_compile.plan.planners._walk import Gap, Walk
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.plan.verify import verify


def _slow_between_ranks(blocks: int, factor: float) -> StepProblem:
    """Return training without saved values and updates, in which collectives take `factor` times as long as by default."""
    problem = training(7, blocks, world=4, tiers=2, saved=False, device=0.3, host=1.0)
    links = (
        dataclasses.replace(link, bytes_per_second=link.bytes_per_second / factor)
        if None in (link.source, link.destination)
        else link
        for link in problem.links
    )
    return dataclasses.replace(problem, links=tuple(links), pieces=())


@pytest.mark.parametrize("reach", [1, 2, 4])
@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0])
def test_the_walk_counts_what_gradients_pass_on_their_way_home(reach: int, factor: float) -> None:
    problem = _slow_between_ranks(8, factor)
    homes, within = farthest(problem), (reach, problem.count)
    found = find_gaps(problem, homes, build(problem, homes, ahead_by(problem, homes, {}), planner="walk", reach=within))
    best = best_walk(found.walk, found.gaps, rungs=6, reserves=(0.0, 1.0))
    assert best is not None
    plan = moved_by(problem, homes, best[0].moves).plan(problem, planner="walk", reach=within)
    assert best[0].seconds == pytest.approx(step_seconds(problem, plan, steps=8), rel=1e-6)


def test_a_gradient_has_longer_to_leave_where_many_gathers_are_before_it() -> None:
    """Blocks of eight regions: compute would wait for a reduction that is due four regions behind its own."""
    problem = training(7, 25, world=4, tiers=2, saved=False, even=True)
    regions = tuple(dataclasses.replace(each, seconds=each.seconds / 8) for each in problem.regions for _ in range(8))
    units = (
        dataclasses.replace(unit, uses=tuple(8 * use for use in unit.uses), gradients=tuple(8 * use for use in unit.gradients))
        for unit in problem.units
    )
    links = (
        dataclasses.replace(each, bytes_per_second=each.bytes_per_second / (14 if each.on_lane == "ranks" else 1))
        for each in problem.links
    )
    finer = dataclasses.replace(problem, regions=regions, units=tuple(units), links=tuple(links))
    finer = finer.with_budgets(device=4000, host=None)
    plan = cached_prefetch(finer)
    assert not verify(finer, plan)
    assert step_seconds(finer, plan) <= 1.05 * finer.compute_seconds


def test_compute_waits_until_a_saved_value_has_left_where_its_memory_is_needed() -> None:
    """Region 1 has no room beside what leaves in front of it for 2 s; region 3 needs it back, which takes 1 s."""
    value = Gap(
        key="saved x",
        last=0,
        next=3,
        kept=(4,),
        moving=(4,),
        path=((0, 1.0),),
        leaves=((0, 2.0),),
        leaving=(4,),
    )
    walk = Walk([1.0] * 4, [10], [np.array([6, 8, 8, 6, 0])], lanes=1)
    found = walk.run([value], frozenset())
    assert found is not None
    assert found.seconds == 4 + 2 + 1
    assert [(move.gone, move.start) for move in found.moves] == [(1, 3)]
    assert walk.run([value], frozenset([0])) is None, "it cannot stay"
    assert walk.leave_out([2])
    assert not walk.leave_out([1]), "8 of 7 bytes"


def test_saved_values_leave_for_the_drive_where_the_host_is_full() -> None:
    """8,000 bytes of them, 2,000 too many for the device; gradients and states leave 1,000 on the host, where they pass."""
    problem = training(7, 8, tiers=3, device=1.0, host=1.0)
    problem = dataclasses.replace(
        problem,
        saved=tuple(dataclasses.replace(value, bytes=1000) for value in problem.saved),
        allowed=Allowed(params=(Tier.DEVICE,), grads=(Tier.HOST,), states=(Tier.HOST,)),
    )
    least = {tier: int(moments.max()) for tier, moments in occupied(problem, just_in_time(problem)).items()}
    full = problem.with_budgets(device=least[Tier.DEVICE] - 2000, host=least[Tier.HOST] + 1000)
    plan = cached_prefetch(full)
    assert not verify(full, plan)
    assert {store.to for store in plan.local.stores if store.kind is Kind.SAVED} == {Tier.HOST, Tier.NVME}
