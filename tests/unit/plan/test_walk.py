"""The walk by which the default planner judges what stays: it predicts the step that `simulate` predicts of its plan."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import training

from zinf_compile.plan.planners import cached_prefetch
from zinf_compile.plan.planners._build import ahead_by, build, farthest
from zinf_compile.plan.planners._from_walk import moved_by
from zinf_compile.plan.planners._gaps import find_gaps
from zinf_compile.plan.planners._residency import best_walk
from zinf_compile.plan.problem import StepProblem
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
