"""A shard that is fetched from a drive before its update is over is handed to the fetch, and moved by no link."""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import links

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.critical_path import critical_path
from zinf_compile.plan.lower_bound import lower_bound
from zinf_compile.plan.plan import Fetch, Homes, Kind, Plan
from zinf_compile.plan.planners._build import build
from zinf_compile.plan.planners._updates import deferred
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed, Memory, Region, StatePiece, Unit
from zinf_compile.plan.simulate import Timeline, simulate
from zinf_compile.plan.verify import verify

DEVICE, NVME = Tier.DEVICE, Tier.NVME
SIZE, STATES = 10, 20
FORWARD, BACKWARD = 2, 5
"""Regions that use the unit; there are six, of 1 s each."""


def problem_of(
    *, rate: float, pieces: int = 1, deferrable: bool = True, at_step: int = 0, host_seconds: float = 0.1, first: int = FORWARD
) -> StepProblem:
    """Return one unit of 10 bytes on a drive, as all its states are, which some equal pieces update.

    `at_step`: so many of them cannot be updated beside the next step. `first`: the forward's region that uses the unit.
    """
    states = tuple(
        StatePiece(
            name=f"s{number}",
            units=("u",),
            state_bytes=STATES // pieces,
            read_bytes=STATES // pieces,
            written_bytes=STATES // pieces,
            value_bytes=SIZE // pieces,
            value_read_bytes=SIZE // pieces,
            gradient_bytes=SIZE // pieces,
            host_seconds=host_seconds,
            device_seconds=0.1,
            deferrable=deferrable and number >= at_step,
        )
        for number in range(pieces)
    )
    unit = Unit(name="u", stored_bytes=SIZE, uses=(first, BACKWARD), trained=True, gradients=(BACKWARD,), gradient_bytes=SIZE)
    return StepProblem(
        regions=tuple(Region(name=f"r{number}", seconds=1.0) for number in range(6)),
        units=(unit,),
        pieces=states,
        memories=(Memory(tier=DEVICE), Memory(tier=NVME)),
        links=links(rate),
        allowed=Allowed(params=(NVME,), grads=(NVME,), states=(NVME,)),
    )


def plan_of(problem: StepProblem, *, start: int) -> Plan:
    """Return the plan that fetches the unit for the forward from boundary `start` on, and updates it beside the forward."""
    homes = Homes(params={"u": NVME}, grads={"u": NVME}, states={piece.name: NVME for piece in problem.pieces})
    plan = build(problem, homes, (), planner="test", updates=deferred(problem, homes), done=2 * problem.count)
    first, last = problem.units[0].uses
    fetches = tuple(
        Fetch(Kind.PARAM, "u", NVME, DEVICE, begin, use, use + 1) for begin, use in ((start, first), (last - 1, last))
    )
    plan = dataclasses.replace(plan, local=dataclasses.replace(plan.local, fetches=fetches))
    assert not verify(problem, plan)
    return plan


def fetched(timeline: Timeline) -> list[int]:
    return [span.bytes for span in timeline.lanes["nvme to device"] if span.name.startswith("fetch")]


def test_what_is_asked_for_before_the_update_is_over_is_not_read() -> None:
    problem = problem_of(rate=100.0)  # 0.4 s of reads, 0.1 s of update
    early, late = simulate(problem, plan_of(problem, start=0)), simulate(problem, plan_of(problem, start=1))
    assert fetched(early) == [SIZE]
    assert fetched(late) == [SIZE, SIZE]


def test_of_several_pieces_those_are_read_that_are_updated_by_then() -> None:
    problem = problem_of(rate=16.0, pieces=5)  # each piece is read in 0.5 s
    timeline = simulate(problem, plan_of(problem, start=1))
    forward, backward = fetched(timeline)
    assert backward == SIZE
    assert forward == SIZE // 5, "one piece is updated after 0.6 s, the next one after 1.1 s"


def test_a_value_that_is_handed_over_waits_for_the_update_and_not_for_its_write() -> None:
    problem = problem_of(rate=20.0)  # 2 s of reads, 0.1 s of update, 1.5 s of writes
    plan = plan_of(problem, start=0)
    timeline = simulate(problem, plan)
    assert timeline.seconds == pytest.approx(6 + 0.1 + SIZE / 20.0), (
        "compute waits for the update, and for the gradient at its end"
    )
    assert critical_path(problem, plan).seconds == pytest.approx(timeline.seconds)


def test_a_value_that_was_updated_is_read_behind_its_write() -> None:
    slow = problem_of(rate=20.0)
    slow = dataclasses.replace(slow, links=links(60.0, 8.0))  # 0.67 s of reads, then 3.75 s of writes
    plan = plan_of(slow, start=1)
    timeline = simulate(slow, plan)
    assert timeline.seconds > 0.67 + 0.1 + 3.75 + 1.0, "the forward's fetch comes behind the write"
    assert critical_path(slow, plan).seconds == pytest.approx(timeline.seconds)


@pytest.mark.parametrize("rate", [8.0, 12.0, 20.0, 100.0])
@pytest.mark.parametrize("pieces", [1, 5])
def test_the_bound_knows_of_it(rate: float, pieces: int) -> None:
    problem = problem_of(rate=rate, pieces=pieces)
    seconds = simulate(problem, plan_of(problem, start=0)).seconds
    bound = lower_bound(problem).seconds
    assert bound <= seconds * (1 + 1e-6)


def test_an_update_that_ends_with_the_step_hands_nothing_over() -> None:
    problem = problem_of(rate=1.0, deferrable=False)
    assert fetched(simulate(problem, plan_of(problem, start=0))) == [SIZE, SIZE]
    both = lower_bound(problem).seconds
    assert both > lower_bound(problem_of(rate=1.0)).seconds + 0.9 * SIZE


def test_a_part_that_is_updated_at_the_step_is_read() -> None:
    problem = problem_of(rate=1.0, pieces=5, at_step=2)
    timeline = simulate(problem, plan_of(problem, start=0))
    assert fetched(timeline) == [2 * SIZE // 5, SIZE]
    assert lower_bound(problem).seconds <= timeline.seconds * (1 + 1e-6)


@pytest.mark.parametrize("host_seconds", [0.0, 0.1, 10.0])
def test_a_thread_takes_the_hosts_time(host_seconds: float) -> None:
    problem = problem_of(rate=20.0, host_seconds=host_seconds)
    timeline = simulate(problem, plan_of(problem, start=0))
    assert timeline.busy("update") == pytest.approx(host_seconds)
    assert lower_bound(problem).seconds <= timeline.seconds * (1 + 1e-6)


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("rate", [0.5, 1.0, 4.0])
def test_fewer_moments_only_lower_the_bound(first: int, rate: float) -> None:
    problem = problem_of(rate=rate, first=first)
    seconds = simulate(problem, plan_of(problem, start=0)).seconds
    fine = lower_bound(problem).seconds
    assert fine <= seconds * (1 + 1e-6)
    for cells in (1, 8):
        assert lower_bound(problem, cells=cells).seconds <= fine * (1 + 1e-6)
