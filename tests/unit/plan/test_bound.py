"""The linear programme below all plans: fewer checked moments, steps of microseconds, and what its links do, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import links, training

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.lower_bound import CELLS, Bound, _Programme, lower_bound
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Kind, Plan, Reduction
from zinf_compile.plan.planners import cached_prefetch, just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import KEEP, Allowed, Memory, Region, StatePiece, Unit
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.plan.verify import verify

ROUNDING = 1e-9


def faster(problem: StepProblem, times: float) -> StepProblem:
    """Return the problem with everything so many times as fast."""
    return dataclasses.replace(
        problem,
        regions=tuple(dataclasses.replace(region, seconds=region.seconds / times) for region in problem.regions),
        links=tuple(
            dataclasses.replace(
                link,
                bytes_per_second=link.bytes_per_second * times,
                latency_seconds=link.latency_seconds / times,
                beside=tuple(dataclasses.replace(b, bytes_per_second=b.bytes_per_second * times) for b in link.beside),
            )
            for link in problem.links
        ),
        pieces=tuple(
            dataclasses.replace(p, host_seconds=p.host_seconds / times, device_seconds=p.device_seconds / times)
            for p in problem.pieces
        ),
    )


slow_problems = st.builds(
    training,
    seed=st.integers(0, 1000),
    blocks=st.integers(3, 6),
    tiers=st.sampled_from((1, 2, 3)),
    world=st.sampled_from((1, 4)),
    device=st.sampled_from((0.0, 0.1, 0.3)),
    speed=st.sampled_from((0.03, 0.2, 1.0)),
)


few_blocks = {"seed": st.integers(0, 1000), "blocks": st.integers(1, 3), "tiers": st.sampled_from((2, 3))}


@settings(max_examples=40)
@given(problem=slow_problems)
def test_fewer_moments_only_lower_the_bound(problem: StepProblem) -> None:
    """Gradients that are made behind the last moment are at none of them."""
    assert lower_bound(problem, cells=8).seconds <= lower_bound(problem).seconds * (1 + ROUNDING)


@settings(max_examples=40)
@given(
    problem=st.builds(
        training,
        **few_blocks,
        world=st.sampled_from((1, 2, 4)),
        saved=st.booleans(),
        device=st.just(2.0),
        host=st.just(2.0),
    ),
    planner=st.sampled_from((just_in_time, cached_prefetch)),
)
def test_a_plan_fits_into_what_it_takes(problem: StepProblem, planner: Callable[[StepProblem], Plan]) -> None:
    """Also where one region makes all gradients, and is the one that takes most."""
    plan = planner(problem)
    most = {str(tier): int(taken.max()) for tier, taken in occupied(problem, plan).items()}
    assert lower_bound(problem.with_budgets(**most)).seconds <= step_seconds(problem, plan) * (1 + ROUNDING)


@settings(max_examples=20)
@given(problem=slow_problems)
def test_microseconds_are_bounded_as_seconds_are(problem: StepProblem) -> None:
    slow, fast = lower_bound(problem), lower_bound(faster(problem, 1e6))
    assert fast.seconds * 1e6 == pytest.approx(slow.seconds, rel=1e-6)
    assert max(fast.busy.values()) <= 1 + 1e-6


def larger(problem: StepProblem, times: int) -> StepProblem:
    """Return the problem with so many times the bytes, over links that are so many times as fast."""

    def scaled(row: Any) -> Any:
        sizes = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if "bytes" in f.name}
        return dataclasses.replace(row, **{name: size * times for name, size in sizes.items() if size is not None})

    links = [dataclasses.replace(scaled(link), beside=tuple(map(scaled, link.beside))) for link in problem.links]
    rows = {name: tuple(map(scaled, getattr(problem, name))) for name in ("regions", "memories", "units", "saved", "pieces")}
    return dataclasses.replace(problem, links=tuple(links), **rows)


@pytest.mark.parametrize(
    ("seed", "blocks", "tiers", "saved", "device", "host", "speed"),
    [
        (233, 3, 3, True, 0.8, 0.5, 0.02),
        (216, 3, 3, True, 0.8, 0.2, 0.02),
        (218, 4, 1, False, 0.5, 0.2, 0.02),
        (205, 5, 2, True, 0.8, 0.2, 0.3),
    ],
)
@pytest.mark.parametrize("times", [10**6, 10**9])
def test_gigabytes_are_bounded_as_bytes_are(
    seed: int, blocks: int, tiers: int, saved: bool, device: float, host: float, speed: float, times: int
) -> None:
    """HiGHS takes coefficients below 1e-9 for nothing: shares and bytes must not be in one row as they are."""
    problem = training(seed, blocks, tiers=tiers, saved=saved, device=device, host=host, speed=speed)
    small, large = lower_bound(problem), lower_bound(larger(problem, times), idle_links=True)
    assert large.seconds == pytest.approx(small.seconds, rel=1e-6)


def test_links_of_one_lane_set_the_bound_together() -> None:
    """Gathers and reductions take turns: each has half of the time, and another link more than either."""
    bound = lower_bound(training(2, 6, world=4, tiers=2, device=10.0, speed=0.03), idle_links=True)
    assert bound.by == "ranks"
    assert bound.busy["ranks"] == pytest.approx(1.0)
    assert not {"gather", "reduce"} & set(bound.busy)


@settings(max_examples=20)
@given(problem=slow_problems)
def test_links_move_no_more_than_they_have_to_where_that_is_asked(problem: StepProblem) -> None:
    any_of_them, idle = lower_bound(problem), lower_bound(problem, idle_links=True)
    assert idle.seconds == any_of_them.seconds
    moved, least = (sum(busy for name, busy in bound.busy.items() if name != "compute") for bound in (any_of_them, idle))
    assert least <= moved + 0.01  # of the step: the solver's precision, times what a second of a link costs


def test_what_all_fits_moves_nothing_where_that_is_asked() -> None:
    problem = training(1, 4, tiers=2, device=10.0)
    free = tuple(dataclasses.replace(piece, device_seconds=0.0) for piece in problem.pieces)
    bound = lower_bound(dataclasses.replace(problem, pieces=free), idle_links=True)
    assert bound.by == "compute"
    assert max(bound.busy[name] for name in ("host to device", "device to host")) < 1e-6


def test_what_is_computed_again_takes_its_time_once() -> None:
    """A second of it gives links one second more, not one in each pause."""
    problem = training(1000, 16, tiers=1, device=0.2)
    none_again = dataclasses.replace(
        problem, saved=tuple(dataclasses.replace(value, choices=(KEEP, "nvme")) for value in problem.saved)
    )
    with_it, without = lower_bound(problem).seconds, lower_bound(none_again).seconds
    longest = sum(region.seconds for region in problem.regions[:16])
    assert without - longest <= with_it <= without
    assert with_it > 60.0


def cut(problem: StepProblem, parts: int) -> StepProblem:
    """Return the problem with each piece of states as so many, which are alike."""

    def cut_piece(piece: StatePiece) -> list[StatePiece]:
        sizes = {f.name: getattr(piece, f.name) for f in dataclasses.fields(piece) if "bytes" in f.name}
        seconds = {"host_seconds": piece.host_seconds / parts, "device_seconds": piece.device_seconds / parts}
        small = dataclasses.replace(piece, **{name: size // parts for name, size in sizes.items()}, **seconds)
        return [dataclasses.replace(small, name=f"{piece.name} #{number}") for number in range(parts)]

    return dataclasses.replace(problem, pieces=tuple(part for piece in problem.pieces for part in cut_piece(piece)))


@settings(max_examples=20)
@given(problem=slow_problems)
def test_many_pieces_that_are_alike_are_one(problem: StepProblem) -> None:
    """Only their buffers are smaller. A model of 70B on one rank has 17,000: one by one they took minutes."""
    whole = larger(problem, 8)
    found, expected = lower_bound(cut(whole, 8)).seconds, lower_bound(whole).seconds
    if len(problem.tiers) == 2 and problem.tiers[1].in_memory:
        assert found == pytest.approx(expected, rel=1e-6)
    else:
        assert found <= expected * (1 + 1e-6)


def test_pieces_that_are_alike_take_no_more_variables() -> None:
    whole = larger(training(1, 4, tiers=3), 8)
    sizes = []
    for problem in (whole, cut(whole, 8)):
        programme = _Programme(problem, CELLS)
        programme.solve(idle=0.0)
        sizes.append((len(programme.upper), len(programme.rows.limit)))
    assert sizes[0] == sizes[1]


def gradients_apart(*, workspace: int, rate: float = 10.0, room: int = 100) -> StepProblem:
    """Return three regions, 1 s each, of which the middle one makes a gradient of 40 bytes, and host memory behind links."""
    return StepProblem(
        regions=tuple(Region(name=f"r{n}", seconds=1.0, workspace_bytes=workspace if n == 2 else 0) for n in range(3)),
        units=(Unit(name="u", stored_bytes=1, uses=(0, 1), trained=True, gradients=(1,), gradient_bytes=40),),
        memories=(Memory(tier=Tier.DEVICE, bytes=room), Memory(tier=Tier.HOST)),
        links=links(rate, far=Tier.HOST),
    )


@pytest.mark.parametrize(("workspace", "seconds"), [(50, 3.0), (80, 5.1), (99, 7.0)])
def test_a_gradient_takes_memory_until_it_has_left(workspace: int, seconds: float) -> None:
    """A part of it stays where there is room beside the unit; the rest has left before the region that leaves none."""
    assert lower_bound(gradients_apart(workspace=workspace)).seconds == pytest.approx(seconds)


def test_a_gradient_is_not_sent_before_it_is_made() -> None:
    """The first region's second is of no use to it, and the last one's is; it may be on its way while the next step begins."""
    problem = dataclasses.replace(gradients_apart(workspace=0, rate=40 / 4), allowed=Allowed(grads=(Tier.HOST,)))
    pieces = (StatePiece(name="s", units=("u",), state_bytes=0, read_bytes=0, written_bytes=0, value_bytes=1, deferrable=False),)
    assert lower_bound(problem).seconds == pytest.approx(4.0), "the link is always busy"
    at_step = dataclasses.replace(problem, pieces=pieces)
    assert lower_bound(at_step).seconds == pytest.approx(2.0 + 4.0), "behind the second region, and before the update"


@pytest.mark.parametrize("value", [10, 30])
def test_new_values_are_there_before_they_are_used(value: int) -> None:
    """What the host updates comes back to a parameter on the device before its first use, not beside later regions."""
    unit = Unit(name="u", stored_bytes=value, uses=(0, 1), trained=True, gradients=(1,), gradient_bytes=value)
    piece = StatePiece(name="s", units=("u",), state_bytes=0, read_bytes=0, written_bytes=0, value_bytes=value)
    problem = StepProblem(
        regions=(Region(name="forward", seconds=1.0), Region(name="backward", seconds=9.0)),
        units=(unit,),
        pieces=(piece,),
        memories=(Memory(tier=Tier.DEVICE), Memory(tier=Tier.HOST)),
        links=links(10.0, far=Tier.HOST),
        allowed=Allowed(params=(Tier.DEVICE,), grads=(Tier.DEVICE,), states=(Tier.HOST,), update=(Tier.HOST,)),
    )
    assert lower_bound(problem).seconds == pytest.approx(10.0 + value / 10)


def reduced_once(problem: StepProblem, plan: Plan) -> Plan:
    """Return the plan with one reduction of each unit behind its last gradient, and one way home."""
    last = {unit.name: unit.gradients[-1] + 1 for unit in problem.units}
    reductions = tuple(Reduction(unit.name, unit.gradients, last[unit.name], last[unit.name]) for unit in problem.units)
    stores = [row for row in plan.local.stores if row.kind is not Kind.GRAD or row.start == last[row.name]]
    shared = dataclasses.replace(plan.shared, reductions=tuple(sorted(reductions, key=lambda row: row.start)))
    return dataclasses.replace(plan, shared=shared, local=dataclasses.replace(plan.local, stores=tuple(stores)))


@settings(max_examples=20)
@given(
    problem=st.builds(
        training,
        **few_blocks,
        world=st.sampled_from((2, 4)),
        micro_batches=st.just(3),
        speed=st.sampled_from((0.05, 1.0)),
        device=st.just(9.0),
        host=st.just(2.0),
    )
)
def test_gradients_that_are_reduced_once_for_several_micro_batches_are_bounded_too(problem: StepProblem) -> None:
    """Between the batches the full ones are there, and nothing else of them: there, room is tightest."""
    count = problem.count // 3
    tight = [dataclasses.replace(r, workspace_bytes=10**5 * (n % count == 0)) for n, r in enumerate(problem.regions)]
    problem = dataclasses.replace(problem, regions=tuple(tight)).with_budgets(**dict.fromkeys(problem.tiers))
    plan = reduced_once(problem, just_in_time(problem))
    assert verify(problem, plan) == []
    most = {str(tier): int(taken.max()) for tier, taken in occupied(problem, plan).items()}
    assert lower_bound(problem.with_budgets(**most)).seconds <= step_seconds(problem, plan) * (1 + ROUNDING)


@pytest.mark.parametrize(("busy", "by"), [(0.9999, "compute"), (1.0, "compute"), (1.01, "host to device")])
def test_where_a_link_is_no_busier_compute_sets_the_bound(busy: float, by: str) -> None:
    assert Bound(1.0, {"host to device": busy, "compute": 1.0}).by == by
