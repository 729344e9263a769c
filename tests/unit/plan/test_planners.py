"""All planners on generated problems: legal plans, never below the bound, and the default near it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from plan_cases import SHARES, read_only, read_only_problems, training, training_problems

from zinf_compile.errors import BudgetError
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.lower_bound import lower_bound
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Kind, Plan
from zinf_compile.plan.planners import PLANNERS, cached_prefetch
from zinf_compile.plan.planners._start_early import as_early
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed
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
@example(problem=read_only(6, 6, 0.90625, rate=5.0))
@example(problem=read_only(5, 3, 0.7, rate=5.0))
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


@pytest.mark.parametrize("blocks", [3, 4, 5])
def test_states_that_fit_into_memory_are_there_where_the_device_is_the_host(blocks: int) -> None:
    """Although a thread updates what comes from a drive beside compute."""
    found = []
    for share in (0.3, 0.6, 0.8):
        problem = training(1000, blocks, tiers=1, device=share)
        found.append(step_seconds(problem, cached_prefetch(problem)))
        assert found[-1] <= 1.02 * lower_bound(problem).seconds
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(("tiers", "most"), [(1, 1.42), (3, 1.3)])
def test_homes_are_chosen_by_finer_parts_than_those_of_the_ladder(tiers: int, most: float) -> None:
    """Those of the ladder alone give 1.46 and 1.52 times the bound."""
    problem = training(1000, 16, tiers=tiers, device=0.2, host=0.2)
    assert step_seconds(problem, cached_prefetch(problem)) <= most * lower_bound(problem).seconds


@pytest.mark.parametrize("name", ["cached_prefetch", "largest_first"])
def test_what_fits_stays_and_nothing_moves(name: str) -> None:
    problem = read_only(1, 8, 1.0)
    plan = PLANNERS[name](problem)
    assert not verify(problem, plan)
    assert not list(plan.rows())
    assert set(plan.local.homes.params.values()) == {Tier.DEVICE}
    assert step_seconds(problem, plan) == pytest.approx(problem.compute_seconds)


@settings(max_examples=12, deadline=None)
@given(problem=training_problems(blocks=(1, 4)))
def test_plans_of_training_are_legal_and_never_below_the_bound(problem: StepProblem) -> None:
    bound = lower_bound(problem).seconds
    for planner in PLANNERS.values():
        check(problem, planner, bound)


@pytest.mark.parametrize(("world", "tiers"), [(1, 1), (1, 2), (4, 2), (4, 3)])
def test_a_tenth_of_the_memory_is_enough_for_less_than_twice_the_bound(world: int, tiers: int) -> None:
    problem = training(5, 5, world=world, tiers=tiers, device=0.1, host=0.2)
    assert step_seconds(problem, cached_prefetch(problem)) <= 2 * lower_bound(problem).seconds


@pytest.mark.parametrize("name", PLANNERS)
def test_budgets_that_are_too_small_are_refused_with_what_is_missing(name: str) -> None:
    problem = training(5, 3, world=2).with_budgets(device=100)
    with pytest.raises(BudgetError, match=rf"planner '{name}' needs [\d,]+ bytes of device more than the budget"):
        PLANNERS[name](problem)


def test_words_of_the_user_are_obeyed() -> None:
    problem = training(5, 3, device=1.0, host=1.0)
    allowed = Allowed(params=(Tier.HOST,), grads=(Tier.DEVICE,), states=(Tier.NVME,), update=(Tier.HOST,))
    forced = dataclasses.replace(problem, allowed=allowed)
    plan = cached_prefetch(forced)
    assert not verify(forced, plan)
    assert set(plan.local.homes.params.values()) == {Tier.HOST}
    assert set(plan.local.homes.grads.values()) == {Tier.DEVICE}
    assert set(plan.local.homes.states.values()) == {Tier.NVME}
    assert {update.on for update in plan.local.updates} == {Tier.HOST}


def test_units_of_one_piece_live_where_all_of_them_may() -> None:
    """One has its home already, and is not the first."""
    problem = training(1, 5, tiers=3, device=0.4, host=0.5, speed=0.1)
    units = tuple(dataclasses.replace(u, home=Tier.NVME) if u.name == "w2" else u for u in problem.units)
    pieces = tuple(dataclasses.replace(p, units=("w0", "w2")) if p.name == "s0" else p for p in problem.pieces if p.name != "s2")
    problem = dataclasses.replace(problem, units=units, pieces=pieces)
    assert not verify(problem, cached_prefetch(problem))


def test_a_saved_value_that_must_leave_leaves() -> None:
    problem = training(5, 3, device=1.0, host=1.0)
    values = tuple(dataclasses.replace(value, choices=("host",)) for value in problem.saved[:1])
    forced = dataclasses.replace(problem, saved=(*values, *problem.saved[1:]))
    plan = cached_prefetch(forced)
    assert not verify(forced, plan)
    assert [(store.name, store.to) for store in plan.local.stores if store.kind is Kind.SAVED] == [("a0.0", Tier.HOST)]


def test_room_for_a_small_part_of_what_many_large_units_take_is_used() -> None:
    """A hundred blocks whose full units are far larger than their saved values: all of these stay where there is room."""
    problem = training(3, 100, world=64, even=True, speed=0.1)
    units = tuple(dataclasses.replace(unit, full_bytes=100 * unit.full_bytes) for unit in problem.units)
    saved = sum(value.bytes for value in problem.saved)
    room = 3 * units[0].full_bytes + saved + 12_000
    assert room < sum(unit.full_bytes for unit in units) / 20
    plan = cached_prefetch(dataclasses.replace(problem, units=units).with_budgets(device=room, host=None))
    assert not [store for store in plan.local.stores if store.kind is Kind.SAVED]


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("world", [1, 4])
def test_a_unit_that_no_region_reads_whole_does_not_stay(name: str, world: int) -> None:
    """An embedding of which regions gather single rows: it is trained, but never gathered."""
    problem = training(5, 4, world=world, device=0.3)
    first, *others = problem.units
    problem = dataclasses.replace(problem, units=(dataclasses.replace(first, uses=()), *others))
    plan = PLANNERS[name](problem)
    assert not verify(problem, plan)
    assert first.name not in plan.shared.resident


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("speed", [0.01, 1.0])
def test_a_farther_tier_that_is_offered_makes_no_step_slower(speed: float, tiers: int) -> None:
    """Where all fits on the device as well; what is no faster with it doesn't move."""
    problem = training(0, 100, tiers=tiers, speed=speed, micro_batches=2).with_budgets(device=None)
    near = dataclasses.replace(problem, allowed=Allowed(params=(Tier.DEVICE,), grads=(Tier.DEVICE,), states=(Tier.DEVICE,)))
    alone, plan = cached_prefetch(near), cached_prefetch(problem)
    assert not alone.local.stores
    before, after = step_seconds(near, alone), step_seconds(problem, plan)
    assert after < before if speed == 1.0 else after == before
    if after == before:
        assert not plan.local.stores


@settings(max_examples=40, deadline=None)
@given(problem=training_problems(blocks=(2, 6), tiers=(2,)), planner=st.sampled_from(["one_ahead", "greedy", "just_in_time"]))
def test_shards_of_several_ranks_start_early_and_gathers_when_they_did(problem: StepProblem, planner: str) -> None:
    assume(problem.world_size > 1)
    plan = PLANNERS[planner](problem)
    early = as_early(problem, plan)
    assert verify(problem, early) == []
    for before, after in zip(plan.local.fetches, early.local.fetches, strict=True):
        assert after.start <= max(1, before.start)
        assert dataclasses.replace(after, start=before.start) == before
    for one, other in zip(plan.shared.gathers, early.shared.gathers, strict=True):
        assert other in (one, dataclasses.replace(one, start=1))


def test_a_shard_waits_for_its_gather_in_little_memory() -> None:
    """Room for two gathered units and all shards: each shard comes before its unit is gathered."""
    problem = training(1, 6, world=4, tiers=2, even=True, device=1.0, host=1.0, saved=False)
    problem = dataclasses.replace(problem, allowed=Allowed(params=(Tier.HOST,), grads=(Tier.HOST,), states=(Tier.HOST,)))
    largest, shards = max(unit.full_bytes for unit in problem.units), sum(unit.stored_bytes for unit in problem.units)
    plain = PLANNERS["one_ahead"](problem)
    least = int(occupied(problem, plain)[Tier.DEVICE].max())
    problem = problem.with_budgets(device=least + shards)
    assert shards < 2 * largest
    early = as_early(problem, plain)
    assert 3 * sum(row.start for row in early.local.fetches) < 2 * sum(row.start for row in plain.local.fetches)
    assert early.shared == plain.shared
