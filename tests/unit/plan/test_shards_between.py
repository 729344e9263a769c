"""Shards that stay from a forward to its backward: in room that both plans leave, those that are used first come first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Fetch, Gather, Homes, Kind, Local, Plan, Shared
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Link, Memory, Region, Unit
from zinf_compile.plan.shards_between import Side, shards_between
from zinf_compile.plan.verify import verify

BLOCKS, SHARD, FULL = 4, 4, 8
JUST_IN_TIME = SHARD + FULL
"""Bytes of the device while a region runs for which a unit is brought just in time."""


def side(
    room: Sequence[int],
    order: Sequence[int],
    *,
    ahead: int = 0,
    near: Sequence[str] = (),
) -> Side:
    """Return a graph whose regions read units in an order, each brought `ahead` regions before, with so much room in each."""
    names = [f"u{n}" for n in order]
    homes = {name: Tier.DEVICE if name in near else Tier.HOST for name in names}
    most = max(room)
    problem = StepProblem(
        regions=tuple(Region(name=f"r{n}", seconds=1.0, workspace_bytes=most - own) for n, own in enumerate(room)),
        units=tuple(
            Unit(name=name, stored_bytes=SHARD, full_bytes=FULL, wire_bytes=FULL - SHARD, uses=(place,), home=homes[name])
            for place, name in enumerate(names)
        ),
        memories=(Memory(tier=Tier.DEVICE, bytes=most + SHARD * len(near)), Memory(tier=Tier.HOST)),
        links=(
            Link(name="down", source=Tier.HOST, destination=Tier.DEVICE, bytes_per_second=8.0),
            Link(name="up", source=Tier.DEVICE, destination=Tier.HOST, bytes_per_second=8.0),
            Link(name="from ranks", source=None, destination=Tier.DEVICE, bytes_per_second=8.0),
            Link(name="to ranks", source=Tier.DEVICE, destination=None, bytes_per_second=8.0),
        ),
        world_size=2,
    )
    starts = {name: max(0, place - ahead) for place, name in enumerate(names)}
    gathers = tuple(Gather(name, starts[name], place, place + 1) for place, name in enumerate(names))
    fetches = tuple(
        Fetch(Kind.PARAM, row.unit, Tier.HOST, Tier.DEVICE, row.start, row.due, row.due + 1)
        for row in gathers
        if row.unit not in near
    )
    plan = Plan(shared=Shared(gathers=gathers), local=Local(homes=Homes(params=homes), fetches=fetches))
    assert verify(problem, plan) == []
    return Side(problem, plan, {name: {int(name[1:])} for name in names})


UP, DOWN = range(BLOCKS), range(BLOCKS - 1, -1, -1)


def test_as_many_stay_as_there_is_room_for() -> None:
    """The last block's takes room in no region that hasn't its own; one more needs its shard in the last region and the first."""
    for more, expected in ((0, {3}), (SHARD - 1, {3}), (SHARD, {3, 2}), (2 * SHARD, {3, 2, 1}), (9 * SHARD, {3, 2, 1, 0})):
        room = [JUST_IN_TIME + more] * BLOCKS
        assert shards_between(side(room, UP), side(room, DOWN)) == {f"u{n}" for n in expected}, more


def test_there_must_be_room_in_both() -> None:
    wide, narrow = [JUST_IN_TIME + 2 * SHARD] * BLOCKS, [JUST_IN_TIME] * BLOCKS
    assert shards_between(side(wide, UP), side(narrow, DOWN)) == {"u3"}
    assert shards_between(side(narrow, UP), side(wide, DOWN)) == {"u3"}
    last = [*narrow[:-1], JUST_IN_TIME + SHARD]
    assert shards_between(side(last, UP), side(wide, DOWN)) == {"u3", "u2"}


def test_the_callers_code_has_its_room_in_between() -> None:
    room = [JUST_IN_TIME + 9 * SHARD] * BLOCKS
    for between, expected in ((JUST_IN_TIME + 5 * SHARD, 4), (JUST_IN_TIME + 5 * SHARD + 1, 3), (JUST_IN_TIME + 9 * SHARD, 0)):
        assert len(shards_between(side(room, UP), side(room, DOWN), between=between)) == expected
    near = side(room, DOWN, near=["u0"])
    assert near.begins_with() == JUST_IN_TIME + 9 * SHARD, "without what stands there"


def test_what_is_brought_early_has_its_place_already() -> None:
    """It needs room in the backward until it would be brought."""
    room = [JUST_IN_TIME + 2 * SHARD] * BLOCKS
    for more, expected in ((0, {"u3", "u2"}), (SHARD, {"u3", "u2", "u1"})):
        backward = side([2 * JUST_IN_TIME + more] * BLOCKS, DOWN, ahead=1)
        assert shards_between(side(room, UP), backward) == expected


def test_units_that_live_on_the_device_and_units_of_one_graph_alone_are_left_out() -> None:
    room = [JUST_IN_TIME + 9 * SHARD] * BLOCKS
    assert shards_between(side(room, UP, near=["u3"]), side(room, DOWN, near=["u3"])) == {"u2", "u1", "u0"}
    assert shards_between(side(room, UP), side(room, [3, 9, 1, 0])) == {"u3", "u1", "u0"}


def test_a_unit_of_the_backward_may_be_several_of_the_forward() -> None:
    room = [JUST_IN_TIME + 9 * SHARD] * BLOCKS
    ahead = side(room, UP)
    behind = dataclasses.replace(side(room, DOWN), members={"u3": {2, 3}, "u2": {7}, "u1": {1}, "u0": {0}})
    assert shards_between(ahead, behind) == {"u3", "u1", "u0"}


@settings(max_examples=60, deadline=None)
@given(
    ahead=st.lists(st.integers(0, 6), min_size=BLOCKS, max_size=BLOCKS),
    back=st.lists(st.integers(0, 6), min_size=BLOCKS, max_size=BLOCKS),
    order=st.permutations(range(BLOCKS)),
)
def test_no_region_of_either_holds_more_than_its_room(ahead: list[int], back: list[int], order: list[int]) -> None:
    forward = side([JUST_IN_TIME + SHARD * each for each in ahead], UP)
    backward = side([JUST_IN_TIME + SHARD * each for each in back], order)
    found = shards_between(forward, backward)
    held = occupied(forward.problem, forward.plan)[Tier.DEVICE][:BLOCKS].copy()
    again = occupied(backward.problem, backward.plan)[Tier.DEVICE][:BLOCKS].copy()
    for name in found:
        held[int(name[1:]) + 1 :] += SHARD
        again[: order.index(int(name[1:]))] += SHARD
    assert (held <= forward.problem.room(Tier.DEVICE)).all()
    assert (again <= backward.problem.room(Tier.DEVICE)).all()
