"""All planners on generated problems: legal plans, never below the bound, and the default near it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from plan_cases import SHARES, read_only, read_only_problems

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.lower_bound import lower_bound
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Plan
from zinf_compile.plan.planners import PLANNERS, cached_prefetch
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import simulate, step_seconds
from zinf_compile.plan.verify import verify
from zinf_compile.plan.verify_memory import held

SLACK = 1 - 1e-6
"""Of the solver."""


def check(problem: StepProblem, planner: Callable[[StepProblem], Plan], bound: float) -> float:
    """Assert what holds for every plan, and return its seconds."""
    plan = planner(problem)
    assert not verify(problem, plan)
    timeline = simulate(problem, plan, steps=6)
    assert timeline.seconds >= bound * SLACK
    totals, again = occupied(problem, plan), held(problem, plan)
    for tier in problem.tiers:
        assert (totals[tier] == again[tier]).all(), tier
        assert max((count for _, count in timeline.memory[tier]), default=0) <= totals[tier].max()
        assert totals[tier].max() <= problem.room(tier)
    return timeline.seconds


@settings(max_examples=25, deadline=None)
@given(problem=read_only_problems())
def test_plans_are_legal_and_never_below_the_bound(problem: StepProblem) -> None:
    bound = lower_bound(problem).seconds
    seconds = {name: check(problem, planner, bound) for name, planner in PLANNERS.items()}
    assert seconds["cached_prefetch"] <= min(seconds.values()) * 1.05


def test_the_default_is_near_the_bound() -> None:
    ratios = []
    for seed in range(2):
        for blocks in (12, 20):
            for share in SHARES:
                problem = read_only(seed, blocks, share)
                ratios.append(step_seconds(problem, cached_prefetch(problem)) / lower_bound(problem).seconds)
    assert statistics.mean(ratios) <= 1.03
    assert max(ratios) <= 1.15


@settings(max_examples=25, deadline=None)
@given(problem=read_only_problems(blocks=(2, 10)))
def test_a_larger_budget_is_never_slower(problem: StepProblem) -> None:
    total = sum(unit.stored_bytes for unit in problem.units)
    least = problem.memories[0].bytes
    assert least is not None
    before = float("inf")
    for budget in range(least, total + 1, max(1, (total - least) // 12)):
        larger = problem.with_budgets(device=budget)
        seconds = step_seconds(larger, cached_prefetch(larger), steps=8)
        assert seconds <= before * (1 + 1e-9)
        before = seconds


@pytest.mark.parametrize("name", ["cached_prefetch", "largest_first"])
def test_what_fits_stays_and_nothing_moves(name: str) -> None:
    problem = read_only(1, 8, 1.0)
    plan = PLANNERS[name](problem)
    assert not verify(problem, plan)
    assert not list(plan.rows())
    assert set(plan.local.homes.params.values()) == {Tier.DEVICE}
    assert step_seconds(problem, plan) == pytest.approx(problem.compute_seconds)
