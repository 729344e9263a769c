"""Homes by filling the nearest tiers: within what a check allows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import training, training_problems

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.fill_homes import Check, Excess, fill_homes
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
