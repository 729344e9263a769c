"""Plans and bounds against the exact optimum of small problems."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from plan_cases import SHARES, read_only, read_only_problems
from plan_optimum import optimum

from zinf_compile.plan.lower_bound import lower_bound
from zinf_compile.plan.planners import PLANNERS, cached_prefetch
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import step_seconds


@settings(max_examples=15, deadline=None)
@given(problem=read_only_problems(blocks=(1, 4)))
def test_no_plan_beats_the_optimum_and_no_optimum_the_bound(problem: StepProblem) -> None:
    best, proven = optimum(problem, seconds=10.0)
    assert lower_bound(problem).seconds <= best * (1 + 1e-6)
    for planner in PLANNERS.values():
        assert step_seconds(problem, planner(problem), steps=8) >= proven * (1 - 1e-6)
    assert step_seconds(problem, cached_prefetch(problem), steps=8) <= best * 1.08


def ratios(blocks: tuple[int, ...], seeds: range, seconds: float) -> list[float]:
    found = []
    for count in blocks:
        for share in SHARES:
            for seed in seeds:
                problem = read_only(seed, count, share)
                best, _ = optimum(problem, seconds=seconds, gap=1e-3)
                found.append(step_seconds(problem, cached_prefetch(problem), steps=8) / best)
    return found


def test_the_default_is_near_the_optimum() -> None:
    found = ratios((4,), range(50, 52), 10.0)
    assert statistics.mean(found) <= 1.02
    assert max(found) <= 1.08


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_the_default_is_near_the_optimum_of_up_to_8_blocks() -> None:
    found = ratios((5, 6, 8), range(3), 60.0)
    assert statistics.mean(found) <= 1.02
    assert max(found) <= 1.08
