"""A plan in less room: what moves starts later, gathers keep their order, and too little is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import training_problems

from zinf_compile.errors import BudgetError
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.hold_back import hold_back, within_room
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Gather, Homes, Local, Plan, Shared
from zinf_compile.plan.planners import PLANNERS
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Link, Memory, Region, Unit
from zinf_compile.plan.verify import verify


def issued(plan: Plan) -> list[tuple[str, int]]:
    """Return gathers in the order in which they are issued."""
    return [(row.unit, row.due) for row in sorted(plan.shared.gathers, key=lambda row: (row.start, row.due))]


@settings(max_examples=25, deadline=None)
@given(problem=training_problems(blocks=(1, 4)), planner=st.sampled_from(sorted(PLANNERS)))
def test_gathers_keep_their_order_and_nothing_takes_more(problem: StepProblem, planner: str) -> None:
    plan = PLANNERS[planner](problem)
    later = hold_back(plan)
    assert not verify(problem, later)
    assert issued(later) == issued(plan)
    assert all(row.start <= held.start <= held.due for row, held in zip(plan.shared.gathers, later.shared.gathers, strict=True))
    before, after = occupied(problem, plan), occupied(problem, later)
    assert all((after[tier] <= before[tier]).all() for tier in problem.tiers)
    assert later.shared.reductions == plan.shared.reductions
    assert later.local.stores == plan.local.stores


def gathered(room: int) -> StepProblem:
    """Return four regions that each read a unit of 8 bytes on two ranks."""
    return StepProblem(
        regions=tuple(Region(name=f"r{n}", seconds=1.0) for n in range(4)),
        units=tuple(Unit(name=f"u{n}", stored_bytes=4, full_bytes=8, wire_bytes=4, uses=(n,)) for n in range(4)),
        memories=(Memory(tier=Tier.DEVICE, bytes=room),),
        links=(
            Link(name="from ranks", source=None, destination=Tier.DEVICE, bytes_per_second=8.0),
            Link(name="to ranks", source=Tier.DEVICE, destination=None, bytes_per_second=8.0),
        ),
        world_size=2,
    )


def rows(*times: tuple[int, int, int, int]) -> Plan:
    homes = Homes(params={f"u{n}": Tier.DEVICE for n in range(4)})
    return Plan(shared=Shared(gathers=tuple(Gather(f"u{n}", *when) for n, *when in times)), local=Local(homes=homes))


def test_what_is_brought_early_is_brought_when_it_is_due() -> None:
    assert hold_back(rows((0, 0, 0, 1), (1, 0, 1, 2), (2, 0, 2, 3))) == rows((0, 0, 0, 1), (1, 1, 1, 2), (2, 2, 2, 3))


def test_what_overtakes_another_does_so_still() -> None:
    """The unit of region 3 is gathered before that of region 1, by all ranks."""
    plan = rows((3, 0, 3, 4), (1, 1, 1, 2), (2, 1, 2, 3))
    later = hold_back(plan)
    assert later == rows((3, 0, 3, 4), (1, 1, 1, 2), (2, 2, 2, 3))
    assert issued(later) == issued(plan) == [("u3", 3), ("u1", 1), ("u2", 2)]


def test_a_plan_that_fits_stays_as_it_is() -> None:
    plan = rows((0, 0, 0, 1), (1, 0, 1, 2), (2, 0, 2, 3), (3, 1, 3, 4))
    assert within_room(gathered(16 + 3 * 8), plan) is plan
    for room in (16 + 3 * 8 - 1, 16 + 8):
        assert within_room(gathered(room), plan) == rows(*((n, n, n, n + 1) for n in range(4)))


def test_units_that_stay_need_their_room() -> None:
    problem = gathered(16 + 8)
    plan = rows((0, 0, 0, 3), (1, 1, 1, 2), (2, 2, 2, 3), (3, 3, 3, 4))
    with pytest.raises(BudgetError, match="8 bytes of device too little for the units that stay gathered") as refused:
        within_room(problem, plan)
    assert "compile for the largest batch first" in str(refused.value)
