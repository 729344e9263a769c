"""A forward and its backward as one problem, and its plan as the plans of both."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_compile.errors import BudgetError
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.acted import Part, acted_plan
from zinf_compile.plan.both_graphs import Half, away_in_between, halves, joined, retimed, with_held, with_saved
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Kind
from zinf_compile.plan.planners import PLANNERS, just_in_time
from zinf_compile.plan.planners._start_early import AT_FIRST, as_early
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Link, Memory, Region, SavedValue, Unit
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.plan.verify import verify

SIZE = 100


def problem_of(
    blocks: int, regions: list[Region], uses: dict[int, tuple[int, ...]], home: Tier, *, narrow: bool, device: int
) -> StepProblem:
    tiers = [Tier.DEVICE, Tier.HOST, *([Tier.NVME] if home == Tier.NVME else [])]
    links = []
    for near, far in itertools.pairwise(tiers):
        links.append(Link(name=f"{near} to {far}", source=near, destination=far, bytes_per_second=50.0))
        links.append(Link(name=f"{far} to {near}", source=far, destination=near, bytes_per_second=50.0))
    units = [
        Unit(
            name=f"w{block}",
            stored_bytes=SIZE + block,
            uses=uses[block],
            full_bytes=(SIZE + block) // 2 if narrow else 0,
            trained=True,
            home=home,
        )
        for block in range(blocks)
        if uses[block]
    ]
    return StepProblem(
        regions=tuple(regions),
        memories=tuple(Memory(tier=tier, bytes=device if tier == Tier.DEVICE else None) for tier in tiers),
        links=tuple(links),
        units=tuple(units),
    )


def regions_of(name: str, workspaces: list[int]) -> list[Region]:
    return [
        Region(name=f"{name} 0:{number}", seconds=1.0, workspace_bytes=count, graph=f"{name} 0")
        for number, count in enumerate(workspaces)
    ]


def three(
    blocks: int, home: Tier, *, narrow: bool, room: tuple[int, int], workspaces: list[int]
) -> tuple[StepProblem, StepProblem, StepProblem]:
    """Return the problems of both graphs without budgets, and of each with its own room beside what its regions take.

    Block by block forward, and back; the last one's weight is not used in the backward.
    """
    ahead, back = regions_of("forward", workspaces[:blocks]), regions_of("backward", workspaces[blocks:])
    uses = {block: (block, 2 * blocks - 1 - block) if block < blocks - 1 else (block,) for block in range(blocks)}
    both = problem_of(blocks, [*ahead, *back], uses, home, narrow=narrow, device=0).with_budgets(device=None)
    alone = []
    for first, own, left in ((0, ahead, room[0]), (blocks, back, room[1])):
        here = {n: tuple(use - first for use in found if first <= use < first + blocks) for n, found in uses.items()}
        most = max(region.workspace_bytes for region in own)
        alone.append(problem_of(blocks, own, here, home, narrow=narrow, device=most + left))
    return both, alone[0], alone[1]


def seconds_of(problem: StepProblem, found: tuple[Half, Half], count: int) -> float:
    parts = [
        Part(half.plan, first, {name: (name,) for name in half.problem.unit}, half.handed if first else ())
        for half, first in zip(found, (0, count), strict=True)
    ]
    plan = acted_plan(problem, parts, just_in_time(problem).local.homes)
    assert verify(problem, plan) == []
    return step_seconds(problem, plan)


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.integers(2, 6),
    home=st.sampled_from([Tier.HOST, Tier.NVME]),
    room=st.tuples(st.integers(2 * SIZE + 20, 9 * SIZE), st.integers(2 * SIZE + 20, 9 * SIZE)),
    workspaces=st.lists(st.integers(0, 150), min_size=12, max_size=12),
    planner=st.sampled_from(["largest_first", "greedy", "cached_prefetch"]),
)
def test_halves_of_any_plan_are_legal_and_as_fast(
    blocks: int, home: Tier, room: tuple[int, int], workspaces: list[int], planner: str
) -> None:
    both, forward, backward = three(blocks, home, narrow=False, room=room, workspaces=workspaces[: 2 * blocks])
    problem = joined(both, forward, backward)
    for number, region in enumerate(problem.regions):
        own, at = (forward, number) if number < blocks else (backward, number - blocks)
        assert problem.room(Tier.DEVICE) - region.workspace_bytes == own.room(Tier.DEVICE) - own.regions[at].workspace_bytes
    plan = PLANNERS[planner](problem)
    found = halves(problem, plan, blocks)
    for half in found:
        assert verify(half.with_held, half.plan) == []
        assert half.handed <= half.problem.unit.keys()
    if home == Tier.HOST:  # what stays in host memory over the border is read again
        early = [row for row in plan.local.fetches if row.start < blocks <= row.due]
        if not early:  # the backward's own come when it begins
            assert seconds_of(problem, found, blocks) <= step_seconds(problem, plan) * (1 + 1e-9)


def test_a_unit_that_stays_is_left_and_found() -> None:
    both, forward, backward = three(3, Tier.HOST, narrow=False, room=(300, 400), workspaces=[0] * 6)
    problem = joined(both, forward, backward)
    ahead, back = halves(problem, PLANNERS["cached_prefetch"](problem), 3)
    assert ahead.handed == back.handed != frozenset()
    for name in ahead.handed:
        assert max(row.until for row in ahead.plan.local.fetches if row.name == name) == 3
        (row,) = [row for row in back.plan.local.fetches if row.name == name]
        (use,) = back.problem.unit[name].uses
        assert (row.start, row.due) == (use, use), "if it isn't found, it is brought for its use"
        assert all(back.held[region] >= SIZE for region in range(use))
    kept = seconds_of(problem, (ahead, back), 3)
    apart = dataclasses.replace(ahead, handed=frozenset()), dataclasses.replace(back, handed=frozenset())
    assert kept < seconds_of(problem, apart, 3)


def test_a_unit_in_a_narrower_type_needs_no_other_memory_where_it_is_found() -> None:
    both, forward, backward = three(3, Tier.HOST, narrow=True, room=(700, 700), workspaces=[9] * 6)
    problem = joined(both, forward, backward)
    ahead, back = halves(problem, PLANNERS["cached_prefetch"](problem), 3)
    assert ahead.handed
    for half in (ahead, back):
        assert verify(half.with_held, half.plan) == []
    for name in back.handed:
        (use,) = back.problem.unit[name].uses
        assert [(row.start, row.due) for row in back.plan.shared.gathers if row.unit == name] == [(use, use)]


def test_a_shard_on_a_drive_is_read_again_by_who_finds_nothing() -> None:
    both, forward, backward = three(4, Tier.NVME, narrow=False, room=(900, 900), workspaces=[0] * 8)
    problem = joined(both, forward, backward)
    ahead, back = halves(problem, PLANNERS["cached_prefetch"](problem), 4)
    for name in ahead.handed:
        hops = [(row.source, row.to) for row in back.plan.local.fetches if row.name == name and row.kind is Kind.PARAM]
        assert sorted(hops) == sorted([(Tier.NVME, Tier.HOST), (Tier.HOST, Tier.DEVICE)])


@pytest.mark.parametrize("between", [0, 40])
def test_halves_have_the_memory_of_both_again(between: int) -> None:
    """Plans are made again from the problems of the last time."""
    both, forward, backward = three(4, Tier.HOST, narrow=False, room=(500, 700), workspaces=[5, 80, 20, 9, 30, 60, 7, 0])
    problem = joined(both, forward, backward, between=between)
    ahead, back = halves(problem, PLANNERS["cached_prefetch"](problem), 4, between=between)
    assert verify(back.with_held, back.plan) == []
    again = joined(both, ahead.problem, back.problem, between=between)
    assert again.memories == problem.memories
    assert again.regions == problem.regions


def test_code_between_both_has_room() -> None:
    both, forward, backward = three(3, Tier.HOST, narrow=False, room=(400, 400), workspaces=[0] * 6)
    plan = PLANNERS["cached_prefetch"](joined(both, forward, backward, between=150))
    assert occupied(joined(both, forward, backward), plan)[Tier.DEVICE][3] <= 250
    with pytest.raises(BudgetError):
        PLANNERS["cached_prefetch"](joined(both, forward, backward, between=450))


def test_saved_values_move_when_the_plan_says() -> None:
    both, forward, backward = three(4, Tier.HOST, narrow=False, room=(250, 250), workspaces=[0, 90, 90, 90, 90, 90, 90, 0])
    whole = joined(both, forward, backward)
    value = SavedValue(name="a of forward 0", bytes=90, made_in=0, used_in=(7,), choices=(str(Tier.HOST),))
    late = {value.name: SavedMemory(name="a", outputs=(0,), inputs=("a",), bytes=90, tier=Tier.HOST, lag=2, lead=2)}
    homes = just_in_time(both).local.homes
    acted = acted_plan(dataclasses.replace(whole, saved=(value,)), (), homes, saved=late)
    apart = with_saved(whole, [value], acted)
    taken = [before.workspace_bytes - after.workspace_bytes for before, after in zip(whole.regions, apart.regions, strict=True)]
    there = [0, 1, 2, 5, 6, 7]
    assert taken == [min(90, r.workspace_bytes) if number in there else 0 for number, r in enumerate(whole.regions)]
    plan = PLANNERS["cached_prefetch"](apart)
    assert verify(apart, plan) == []
    (out,) = [row for row in plan.local.stores if row.kind is Kind.SAVED]
    (back,) = [row for row in plan.local.fetches if row.kind is Kind.SAVED]
    moved = retimed(late, plan, whole.device)[value.name]
    assert (moved.lag, moved.lead) == (max(1, out.due - out.start), max(1, back.due - back.start))
    assert dataclasses.replace(moved, lag=2, lead=2) == late[value.name]
    again = acted_plan(apart, (), homes, saved={value.name: moved}).local
    assert [row for row in (*again.stores, *again.fetches) if row.kind is Kind.SAVED] == [out, back]
    for half in halves(with_held(whole, [-region.workspace_bytes for region in whole.regions]), plan, 4):
        assert not half.plan.local.stores
        assert {row.kind for row in half.plan.local.fetches} == {Kind.PARAM}


def test_what_is_away_in_between_has_two_uses() -> None:
    def value(name: str, made_in: int, *used_in: int) -> SavedValue:
        return SavedValue(name=name, bytes=1, made_in=made_in, used_in=used_in)

    values = [value("a", 0, 1, 5, 7), value("b", 2, 3), value("c", 0, 1), value("d", 1, 3), value("e", 0)]
    found = list(away_in_between(values, 3))
    assert [(each.name, each.made_in, each.used_in) for each in found] == [("a", 1, (5,)), ("d", 1, (3,))], "b has no time for it"


@pytest.mark.parametrize("room", [250, 1000])
def test_the_planner_lets_leave_what_must(room: int) -> None:
    """Also where all of it would fit, and where keeping it would be faster."""
    both, forward, backward = three(4, Tier.HOST, narrow=False, room=(room, room), workspaces=[0] * 8)
    value = SavedValue(name="a", bytes=90, made_in=1, used_in=(6,), choices=(str(Tier.HOST),))
    problem = dataclasses.replace(joined(both, forward, backward), saved=(value,))
    plan = PLANNERS["cached_prefetch"](problem)
    assert verify(problem, plan) == []


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.integers(2, 6),
    room=st.integers(2 * SIZE + 20, 9 * SIZE),
    workspaces=st.lists(st.integers(0, 150), min_size=12, max_size=12),
    planner=st.sampled_from(["just_in_time", "one_ahead", "largest_first", "greedy"]),
    narrow=st.booleans(),
)
def test_transfers_may_start_as_early_as_there_is_room(
    blocks: int, room: int, workspaces: list[int], planner: str, narrow: bool
) -> None:
    both, forward, backward = three(blocks, Tier.HOST, narrow=narrow, room=(room, room), workspaces=workspaces[: 2 * blocks])
    problem = joined(both, forward, backward)
    plan = PLANNERS[planner](problem)
    early = as_early(problem, plan)
    assert verify(problem, early) == []
    rows = sorted(zip(plan.local.fetches, early.local.fetches, strict=True), key=lambda pair: pair[0].due)
    for before, after in rows:
        assert dataclasses.replace(after, start=before.start) == before
        assert after.start <= max(before.start, 1)
    starts = [after.start for _, after in rows]
    assert starts == sorted(starts), "in the order of dues"
    largest = max(unit.stored_bytes for unit in problem.units)
    first = [problem.unit[row.name].stored_bytes for row in early.local.fetches if row.start == 0 < row.due]
    assert sum(first) <= AT_FIRST * largest


def test_without_budgets_everything_stays() -> None:
    both, forward, backward = three(3, Tier.HOST, narrow=False, room=(0, 0), workspaces=[5] * 6)
    free = [problem.with_budgets(device=None) for problem in (forward, backward)]
    problem = joined(both, *free)
    assert problem.room(Tier.DEVICE) == float("inf")
    ahead, back = halves(problem, PLANNERS["cached_prefetch"](problem), 3)
    assert ahead.handed == back.problem.unit.keys()
