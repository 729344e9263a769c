"""What homes are expected to cost, part by part, and the search that goes by it."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import training

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.planners import cached_prefetch
from zinf_compile.plan.planners._build import farthest, nearest
from zinf_compile.plan.planners._expected import Expected
from zinf_compile.plan.planners._homes import fits, held_bytes
from zinf_compile.plan.planners._near_homes import climb, near_homes
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed
from zinf_compile.plan.simulate import step_seconds


def drive(blocks: int = 4, speed: float = 1.0) -> StepProblem:
    """Return equal blocks of a device and a drive: the forward takes 4 s, the backward 8."""
    return training(0, blocks, tiers=1, even=True, saved=False, speed=speed)


def test_states_on_a_drive_delay_the_forward_alone() -> None:
    """100 elements a block: 12 bytes of states read and written; both ways of the drive take turns."""
    problem = drive()
    far = farthest(problem)
    near = dataclasses.replace(far, params=dict.fromkeys(far.params, Tier.DEVICE), grads=dict.fromkeys(far.grads, Tier.DEVICE))
    read, write = problem.links
    states = 4 * 1200 * (1 / read.bytes_per_second + 1 / write.bytes_per_second)
    assert states > 4.0
    assert Expected(problem).seconds(near) == pytest.approx(states + 8.0)
    there = dataclasses.replace(near, states=dict.fromkeys(near.states, Tier.DEVICE))
    updates = sum(piece.device_seconds for piece in problem.pieces)
    assert Expected(problem).seconds(there) == pytest.approx(12.0 + updates)


def test_an_update_hands_parameters_over_to_the_forward() -> None:
    """All on the drive: the backward fetches parameters and sends gradients away, the forward has what updates move."""
    problem = drive(speed=0.1)
    read, write = problem.links
    forward = 4 * ((1200 + 400) / read.bytes_per_second + (1200 + 200) / write.bytes_per_second)
    backward = 4 * (200 / read.bytes_per_second + 400 / write.bytes_per_second)
    assert Expected(problem).seconds(farthest(problem)) == pytest.approx(forward + backward)


def test_updates_that_cannot_be_deferred_are_beside_nothing() -> None:
    problem = drive()
    at_step = dataclasses.replace(problem, pieces=tuple(dataclasses.replace(piece, deferrable=False) for piece in problem.pieces))
    read, write = problem.links
    behind = 4 * ((1200 + 400) / read.bytes_per_second + (1200 + 200) / write.bytes_per_second)
    forward = max(4.0, 4 * 200 / read.bytes_per_second)
    backward = max(8.0, 4 * (200 / read.bytes_per_second + 400 / write.bytes_per_second))
    assert Expected(at_step).seconds(farthest(at_step)) == pytest.approx(forward + backward + behind)
    assert Expected(problem, lambda homes: False).seconds(farthest(problem)) == pytest.approx(forward + backward + behind)


def test_gathers_and_reductions_count() -> None:
    problem = training(0, 4, tiers=2, world=4, even=True, saved=False, speed=0.001)
    gather, reduce = problem.link(None, Tier.DEVICE), problem.link(Tier.DEVICE, None)
    near = nearest(problem)
    wire, reduced = problem.units[0].wire_bytes, problem.units[0].reduced_bytes
    ranks = 4 * (2 * gather.seconds(wire) + reduce.seconds(reduced))
    assert Expected(problem).seconds(near) == pytest.approx(ranks)
    units = tuple(dataclasses.replace(unit, reduced_at_step=True) for unit in problem.units)
    at_step = dataclasses.replace(problem, units=units, allowed=Allowed(grads=(Tier.DEVICE,)))
    assert Expected(at_step).seconds(near) == pytest.approx(ranks), "behind the step, which nothing hides either"


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_a_climb_gains_with_each_step_and_stays_within_what_works(tiers: int) -> None:
    problem = training(3, 8, tiers=tiers, device=0.3, host=0.3, speed=0.05)
    expected, start, asked = Expected(problem), farthest(problem), []

    def works(homes: object) -> bool:
        asked.append(homes)
        return held_bytes(problem, asked[-1])[Tier.DEVICE] <= 0.8 * problem.room(Tier.DEVICE)

    found = climb(problem, start, expected, works)
    assert found in asked
    assert works(found)
    assert fits(problem, found)
    assert expected.seconds(found) < 0.9 * expected.seconds(start)
    better = [choice for choice in near_homes(problem, found, expected, parts=9) if works(choice.homes)]
    assert all(choice.expected >= 0.998 * expected.seconds(found) for choice in better), "nothing near is better"
    assert climb(problem, found, expected, lambda homes: False) == found


def test_budgets_are_filled_where_pieces_are_small() -> None:
    """Of 64 small pieces, what does not fit on the device is on the drive: one eighth of the room is left for what moves."""
    problem = training(3, 64, tiers=1, device=0.5, even=True, saved=False)
    plan = cached_prefetch(problem)
    assert held_bytes(problem, plan.local.homes)[Tier.DEVICE] >= 7 / 8 * problem.room(Tier.DEVICE)
    assert step_seconds(problem, plan) <= 1.05 * Expected(problem).seconds(plan.local.homes)
