"""When deferred updates are due: as their pieces arrive, through as many buffers as there are, and at their use at the latest.

Those that a device computes; the host's own run beside it.
"""

from __future__ import annotations

import dataclasses

import pytest
from plan_cases import links

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.lower_bound import lower_bound
from zinf_compile.plan.plan import Homes, Plan, Update
from zinf_compile.plan.planners import cached_prefetch
from zinf_compile.plan.planners._build import build
from zinf_compile.plan.planners._updates import deferred
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed, Link, Memory, Region, StatePiece, Unit
from zinf_compile.plan.simulate import simulate
from zinf_compile.plan.verify import verify

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
BLOCKS = 6
ON_THE_DEVICE = Allowed(update=(DEVICE,))


def problem_of(*, rate: float, apart: bool = True, seconds: float = 0.0) -> StepProblem:
    """Return regions of 1 s each, forward and backward; a unit for each block, its states of 10 bytes on a drive of that rate.

    `apart`: host memory beside the device's, updates on the device; otherwise the device is the host. `seconds`: of an update.
    """
    names = range(BLOCKS)
    units = tuple(
        Unit(
            name=f"u{block}",
            stored_bytes=1,
            uses=(block, 2 * BLOCKS - 1 - block),
            trained=True,
            gradients=(2 * BLOCKS - 1 - block,),
            gradient_bytes=1,
        )
        for block in names
    )
    pieces = tuple(
        StatePiece(
            name=f"s{block}",
            units=(f"u{block}",),
            state_bytes=10,
            read_bytes=10,
            written_bytes=10,
            value_bytes=1,
            gradient_bytes=1,
            host_seconds=seconds,
            device_seconds=seconds,
        )
        for block in names
    )
    beside = (Memory(tier=HOST),) if apart else ()
    return StepProblem(
        regions=tuple(Region(name=f"r{number}", seconds=1.0) for number in range(2 * BLOCKS)),
        units=units,
        pieces=pieces,
        memories=(Memory(tier=DEVICE), *beside, Memory(tier=NVME)),
        links=links_of(rate) if apart else links(rate),
        allowed=ON_THE_DEVICE if apart else Allowed(),
    )


def links_of(rate: float) -> tuple[Link, ...]:
    """Return the links of a drive of that rate, and of a device that is much faster."""
    return (*links(rate, near=HOST), *links(1e9, far=HOST))


def homes_of(*on_device: int) -> Homes:
    names = [f"u{block}" for block in range(BLOCKS)]
    states = {f"s{block}": DEVICE if block in on_device else NVME for block in range(BLOCKS)}
    return Homes(params=dict.fromkeys(names, DEVICE), grads=dict.fromkeys(names, DEVICE), states=states)


def plan_of(problem: StepProblem, homes: Homes, updates: tuple[Update, ...], buffers: int) -> Plan:
    done = 2 * problem.count
    return build(problem, homes, (), planner="test", updates=updates, buffers=buffers, done=done)


def test_a_piece_is_due_when_its_read_is_over() -> None:
    problem, homes = problem_of(rate=21.0), homes_of(0, 1, 2)  # half a second for a read
    updates = deferred(problem, homes, buffers=3)
    assert [(row.piece, row.start - problem.count, row.due - problem.count) for row in updates] == [
        ("s0", 0, 0),
        ("s1", 0, 1),
        ("s2", 0, 2),
        ("s3", 0, 1),
        ("s4", 0, 1),
        ("s5", 0, 2),
    ]


def test_states_on_the_device_take_no_buffer() -> None:
    problem, homes = problem_of(rate=20.0), homes_of(0, 1, 2, 3)
    plan = plan_of(problem, homes, deferred(problem, homes, buffers=1), 1)
    assert not verify(problem, plan)
    assert [update.start for update in plan.local.updates if update.piece == "s4"] == [problem.count]
    assert simulate(problem, plan).seconds == pytest.approx(2 * BLOCKS), "all transfers beside compute"


def test_a_slow_drive_is_waited_for_at_the_use_and_nowhere_else() -> None:
    problem, homes = problem_of(rate=2.0), homes_of(0, 1, 2, 3, 4)  # 5 s for a read, and a use behind 5 regions
    plan = plan_of(problem, homes, deferred(problem, homes, buffers=1), 1)
    assert simulate(problem, plan).seconds == pytest.approx(2 * BLOCKS)
    slower = dataclasses.replace(problem, links=links_of(1.6))  # 6.25 s
    plan = plan_of(slower, homes, deferred(slower, homes, buffers=1), 1)
    timeline = simulate(slower, plan)
    assert timeline.seconds == pytest.approx(2 * BLOCKS + 1.25, rel=1e-4)
    assert timeline.waited == {"host to device": pytest.approx(1.25, rel=1e-4)}


def test_a_buffer_in_use_is_named() -> None:
    problem, homes = problem_of(rate=20.0), homes_of(0, 1, 2, 3)
    late = tuple(
        dataclasses.replace(row, due=problem.count + 4) if row.piece == "s4" else row for row in deferred(problem, homes)
    )
    wrong = verify(problem, plan_of(problem, homes, late, 1))
    assert any("1 buffers are in use until boundary" in line for line in wrong)


def test_the_default_planner_hides_what_can_be_hidden() -> None:
    problem = problem_of(rate=20.0, apart=False)
    plan = cached_prefetch(problem.with_budgets(**{DEVICE: 60}))
    assert NVME in plan.local.homes.states.values()
    assert simulate(problem, plan).seconds == pytest.approx(2 * BLOCKS)


@pytest.mark.parametrize("apart", [True, False])
def test_a_thread_updates_beside_regions_where_the_device_is_the_host(apart: bool) -> None:
    problem, homes = problem_of(rate=100.0, apart=apart, seconds=0.5), homes_of()
    plan = plan_of(problem, homes, deferred(problem, homes, buffers=BLOCKS), BLOCKS)
    assert not verify(problem, plan)
    timeline = simulate(problem, plan)
    took = 0.5 * BLOCKS
    assert timeline.busy("update") == pytest.approx(0.0 if apart else took)
    compute = 2 * BLOCKS
    if apart:
        assert timeline.seconds == pytest.approx(compute + took, rel=0.05)
    else:
        assert timeline.seconds < compute + took
    bound = lower_bound(problem.with_budgets(**{DEVICE: 60})).seconds
    assert bound <= timeline.seconds * (1 + 1e-6)
    assert bound == pytest.approx(compute + (took if apart else 0.0), rel=0.15)


def test_what_lives_in_memory_takes_computes_time_where_the_device_is_the_host() -> None:
    problem, homes = problem_of(rate=100.0, apart=False, seconds=0.5), homes_of(*range(BLOCKS))
    plan = plan_of(problem, homes, deferred(problem, homes), 1)
    assert simulate(problem, plan).seconds == pytest.approx(2 * BLOCKS + 0.5 * BLOCKS)
