"""Homes by filling the nearest tiers: within what a check allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import training, training_problems

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.fill_homes import RUNGS, Check, Excess, _Ladder, fill_homes, orders
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.planners._expected import Expected
from zinf_compile.plan.planners._homes import held_bytes
from zinf_compile.plan.problem import StepProblem


def within(problem: StepProblem, device: int, host: int) -> Check:
    """Return a check that counts what lives on each tier, and nothing else."""

    def check(homes: Homes) -> Excess:
        held = held_bytes(problem, homes)
        return Excess(held[Tier.DEVICE] - device, held[Tier.HOST] - host if Tier.HOST in problem.tiers else 0)

    return check


def everything(problem: StepProblem) -> int:
    states = sum(piece.state_bytes for piece in problem.pieces)
    return states + sum(unit.stored_bytes + unit.gradient_bytes for unit in problem.units)


@settings(max_examples=25, deadline=None)
@given(training_problems(), st.floats(0, 1), st.floats(0, 1))
def test_homes_are_what_the_check_says_of_them(problem: StepProblem, device: float, host: float) -> None:
    total = everything(problem)
    check = within(problem, int(total * device), int(total * host))
    filled = fill_homes(problem, check)
    assert filled.excess == check(filled.homes)
    assert filled.homes.params.keys() == problem.unit.keys()


@settings(max_examples=10, deadline=None)
@given(training_problems())
def test_what_fits_stays_on_the_device_and_nothing_fits_nowhere(problem: StepProblem) -> None:
    homes = fill_homes(problem, within(problem, everything(problem), 0)).homes
    assert {*homes.params.values(), *homes.grads.values(), *homes.states.values()} <= {Tier.DEVICE}
    assert not fill_homes(problem, lambda homes: Excess(1, 0)).excess.fits


@settings(max_examples=60, deadline=None)
@given(training_problems(), st.floats(-3, 1.2), st.floats(0, 1), st.lists(st.sampled_from([0, 10, 100]), min_size=1, max_size=7))
def test_a_bound_changes_no_choice(problem: StepProblem, device: float, host: float, passing: list[int]) -> None:
    """Whether anything fits or nothing does, and where memory that passes lets nearer homes take less than farther ones."""
    total = everything(problem)
    held = within(problem, int(total * device), int(total * host))

    def check(homes: Homes) -> Excess:
        """Count also what passes, in percent of all, by how many things are on the device."""
        near = [*homes.params.values(), *homes.grads.values(), *homes.states.values()].count(Tier.DEVICE)
        return Excess(held(homes).device + total * passing[near % len(passing)] // 100, held(homes).host)

    assert fill_homes(problem, check, at_least=held) == fill_homes(problem, check)


@settings(max_examples=10, deadline=None)
@given(training_problems(tiers=(2,)))
def test_what_cannot_fit_is_not_checked(problem: StepProblem) -> None:
    """Where the farthest homes lack a byte beside what is held, those that hold more are not asked about."""
    total, asked = everything(problem), [0, 0]
    held = within(problem, 0, total)
    for number, bound in enumerate((held, None)):

        def check(homes: Homes, number: int = number) -> Excess:
            asked[number] += 1
            return Excess(held(homes).device + 1, 0)

        filled = fill_homes(problem, check) if bound is None else fill_homes(problem, check, at_least=bound)
        assert filled.excess == Excess(1, 0)
    assert asked[0] <= 8, "the farthest, the nearest of each order, and what holds nothing"
    assert asked[1] >= asked[0]


def with_sizes(problem: StepProblem, factor: Callable[[int], int]) -> StepProblem:
    """Return the problem with parameters of so many times their bytes, by their number."""
    units = enumerate(problem.units)
    larger = (dataclasses.replace(unit, stored_bytes=factor(number) * unit.stored_bytes) for number, unit in units)
    return dataclasses.replace(problem, units=tuple(larger))


@settings(max_examples=30, deadline=None)
@given(training_problems(), st.sets(st.integers(0, 5)))
def test_small_units_come_nearer_first(problem: StepProblem, numbers: set[int]) -> None:
    """Without the small units each order is what it was; where the device is the host all of it is."""
    sizes = [unit.stored_bytes for unit in problem.units]
    large = 128 * len(sizes) * max(sizes)  # so many times as large that all of the others are small beside one
    small = {unit.name for number, unit in enumerate(problem.units) if number in numbers}
    if small == problem.unit.keys():
        return
    changed = with_sizes(problem, lambda number: 1 if number in numbers else large)
    for found, before in zip(orders(changed), orders(with_sizes(problem, lambda number: large)), strict=True):
        names, earlier = [item[:2] for item in found], [item[:2] for item in before]
        if problem.host == problem.device:
            assert names == earlier
            continue
        belongs = [name in small for _, name in names]
        assert belongs == sorted(belongs, reverse=True)
        assert [each for each in names if each[1] not in small] == [each for each in earlier if each[1] not in small]
        assert [each for each in names if each[1] in small] == [each for each in earlier if each[1] in small]


def test_what_is_not_small_together_keeps_its_place() -> None:
    """One unit is so large that all others are small beside it, but together they are a good part of all."""
    problem = training(0, 24, tiers=3)
    most = max(unit.stored_bytes for unit in problem.units)
    units = [dataclasses.replace(unit, stored_bytes=most) for unit in problem.units]
    equal = dataclasses.replace(problem, units=tuple(units))
    changed = dataclasses.replace(problem, units=(dataclasses.replace(units[0], stored_bytes=64 * most), *units[1:]))
    assert [[item[:2] for item in order] for order in orders(changed)] == [[i[:2] for i in order] for order in orders(equal)]


def test_the_first_rung_has_the_small_units_and_no_other() -> None:
    """More things than there are rungs, every second unit small."""
    problem = training(0, 32, tiers=3)
    most = max(unit.stored_bytes for unit in problem.units)
    changed = with_sizes(problem, lambda number: 1 if number % 2 else 256 * len(problem.units) * most)
    small = {unit.name for number, unit in enumerate(changed.units) if number % 2}
    for order in orders(changed):
        assert len(order) > RUNGS
        ladder = _Ladder(changed, order)
        assert {name for name, tier in ladder.homes(1, 0).params.items() if tier == Tier.DEVICE} == small
        near = [len(ladder.key(rung, 0)[0]) for rung in range(ladder.rungs + 1)]  # type: ignore[index]
        assert near == sorted(near)
        assert (near[0], near[-1]) == (0, len(order))


def test_states_come_before_parameters_where_a_drive_would_delay_the_forward() -> None:
    """Nine tenths of each memory: what is left for the drive is read in the backward as well, or beside the forward alone."""
    problem = training(1000, 32, tiers=3, device=0.2, host=0.2)
    rooms = [int(0.9 * problem.room(tier)) for tier in (Tier.DEVICE, Tier.HOST)]
    homes = fill_homes(problem, within(problem, *rooms)).homes
    drive = {kind: Tier.NVME in getattr(homes, kind).values() for kind in ("params", "grads", "states")}
    assert drive["params"]
    assert drive["grads"]
    assert Expected(problem).seconds(homes) < 1.02 * problem.compute_seconds, (
        "all is hidden; kind by kind it takes a quarter more"
    )
