"""What becomes of saved values: choices in an order, the least that fits, and never more for a larger budget."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import training, training_problems

from zinf_compile.ir.forward_compute import Again
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier, Topology
from zinf_compile.plan.fill_homes import Excess, fill_homes
from zinf_compile.plan.fill_together import fill_together, together_seconds
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.planners._build import farthest
from zinf_compile.plan.planners._homes import held_bytes
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.rough_links import rough_links
from zinf_compile.plan.saved_homes import KEPT, Candidate, Saving, a_few, beside, first_that_fits, may_leave, moving_ways, savings

HERE, APART = Topology(host_apart=False), Topology(host_apart=True)
MIB = 1 << 20


def memory(number: int, size: int = MIB) -> SavedMemory:
    return SavedMemory(name=f"v{number}", outputs=(number,), inputs=(f"v{number}",), bytes=size)


def candidates(rows: Sequence[tuple[int, float, object]], tiers: Sequence[Tier], topology: Topology) -> list[Candidate]:
    """Return a candidate for each (bytes, seconds away, kind)."""
    beside = [Tier.HOST] if topology.host_apart else []
    links = list(rough_links([Tier.DEVICE, *beside, *(tier for tier in tiers if not tier.in_memory)], 1))
    return [
        Candidate(bytes=size, away=away, ways=moving_ways(memory(n, size), tiers, topology, links), kind=kind)
        for n, (size, away, kind) in enumerate(rows)
    ]


def blocks(depth: int, sizes: Sequence[int]) -> list[tuple[int, float, object]]:
    """Return what equal blocks save, one value of each size: what is made first is away longest."""
    count = depth * len(sizes)
    return [(size, 2.0 * (count - at) - 1, at % len(sizes)) for at, size in enumerate(sizes * depth)]


def moved(saving: Saving) -> int:
    return sum(each.bytes for each in saving.moving)


def test_equal_blocks_alike_but_for_the_kind_that_leaves_in_part() -> None:
    rows = blocks(12, [MIB, 4 * MIB, MIB])
    found = savings(candidates(rows, [Tier.NVME], HERE))
    assert found[0] == KEPT
    assert moved(found[-1]) == sum(size for size, *_ in rows)
    for before, after in itertools.pairwise(found):
        assert set(before.moving) < set(after.moving), "each choice moves all that the one before moves"
    for saving in found:
        by_kind = Counter(each.outputs[0] % 3 for each in saving.moving)
        assert sum(0 < count < 12 for count in by_kind.values()) <= 1, "of one kind at most the last blocks' stay"
        for kind, count in by_kind.items():
            assert {each.outputs[0] // 3 for each in saving.moving if each.outputs[0] % 3 == kind} == set(range(count))
    assert [each.outputs[0] for each in found[2].moving] == sorted(each.outputs[0] for each in found[2].moving)


def test_a_few_of_many_choices() -> None:
    found = savings(candidates(blocks(24, [MIB, MIB]), [Tier.NVME], HERE))
    few = a_few(found)
    assert (len(few), few[0], few[-1]) == (7, found[0], found[-1])
    assert a_few(found[:3]) == found[:3]


def test_what_is_away_longest_leaves_first() -> None:
    order = savings(candidates([(MIB, 1.0, "a"), (MIB, 3.0, "b"), (MIB, 2.0, "c")], [Tier.NVME], HERE))
    assert [[each.name for each in saving.moving] for saving in order] == [[], ["v1"], ["v1", "v2"], ["v0", "v1", "v2"]]


def test_two_tiers_and_the_seconds_of_each_link() -> None:
    found = savings(candidates([(2 * MIB, 4.0, 0), (2 * MIB, 2.0, 1)], [Tier.HOST, Tier.NVME], APART))
    tiers = [[str(each.tier) for each in saving.moving] for saving in found]
    assert tiers == [[], ["host"], ["nvme"], ["nvme"], ["host", "host"], ["nvme", "host"], ["nvme", "nvme"]]
    copies, drive = 2 * MIB / 2e10, 2 * MIB / 2e9
    assert found[1].seconds == {"device to host": copies, "host to device": copies}
    assert found[2].seconds == {"device to host": copies, "host to device": copies, "nvme": 2 * drive}
    assert found[-1].cost == pytest.approx(4 * (copies + drive))


def test_host_memory_goes_to_what_is_back_soonest() -> None:
    found = savings(candidates([(MIB, 4.0, 0), (MIB, 2.0, 1)], [Tier.HOST, Tier.NVME], APART))

    def check(saving: Saving) -> Excess:
        held = Counter({Tier.DEVICE: 2 * MIB - moved(saving)})
        held.update({Tier.HOST: sum(each.bytes for each in saving.moving if each.tier == Tier.HOST)})
        return Excess(held[Tier.DEVICE], held[Tier.HOST] - MIB)

    assert [(each.name, str(each.tier)) for each in first_that_fits(found, check).moving] == [("v0", "nvme"), ("v1", "host")]


def test_small_and_dynamic_memory_stays() -> None:
    small = SavedMemory(name="s", outputs=(0,), inputs=("s",), bytes=1000)
    dynamic = SavedMemory(name="d", outputs=(1,), inputs=("d",), bytes=MIB, dynamic=True)
    assert may_leave([small, dynamic, memory(2)]) == (memory(2),)


def test_where_nothing_fits_the_one_that_lacks_least() -> None:
    found = savings(candidates([(MIB, 2.0, 0), (MIB, 1.0, 1)], [Tier.NVME], HERE))
    lacking = dict(zip((each.moving for each in found), (30, 10, 20), strict=True))
    assert first_that_fits(found, lambda saving: Excess(lacking[saving.moving])) == found[1]
    assert savings([]) == (KEPT,)


rows = st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 9, allow_nan=False), st.integers(0, 4)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(rows, st.lists(st.integers(0, 400), min_size=2, max_size=2), st.randoms(use_true_random=False))
def test_a_larger_budget_never_moves_more(drawn: list[tuple[int, float, int]], caps: list[int], random: object) -> None:
    """Whatever each choice takes: moving may take memory of its own."""
    found = savings(candidates([(size, away, kind) for size, away, kind in drawn], [Tier.NVME], HERE))
    needs = {each.moving: random.randint(0, 400) for each in found}  # type: ignore[attr-defined]

    def chosen(cap: int) -> Saving:
        return first_that_fits(found, lambda saving: Excess(needs[saving.moving] - cap))

    small, large = sorted(caps)
    if small >= min(needs.values()):
        assert moved(chosen(large)) <= moved(chosen(small))
        assert needs[chosen(small).moving] <= small
    else:
        assert needs[chosen(small).moving] == min(needs.values()), "the least that works is what is named"


def within(problem: StepProblem, saved: int, device: int) -> Callable[[Homes, Saving], Excess]:
    """Return a check that counts what lives on each tier: host memory has room for anything."""

    def check(homes: Homes, saving: Saving) -> Excess:
        held = held_bytes(problem, homes)
        return Excess(held[Tier.DEVICE] + saved - moved(saving) - device)

    return check


@settings(max_examples=20, deadline=None)
@given(training_problems(tiers=(2,)), rows, st.lists(st.floats(0, 1.1), min_size=2, max_size=2))
def test_together_with_homes_what_is_chosen_costs_least_of_what_fits(
    problem: StepProblem, drawn: list[tuple[int, float, int]], parts: list[float]
) -> None:
    states = sum(unit.stored_bytes + unit.gradient_bytes for unit in problem.units)
    states += sum(piece.state_bytes for piece in problem.pieces)
    unit = max(1, states // 100)
    found = savings(candidates([(size * unit, away, kind) for size, away, kind in drawn], [Tier.NVME], HERE))
    saved = sum(size * unit for size, *_ in drawn)
    fitted = []
    for part in sorted(parts):
        check = within(problem, saved, int(part * (states + saved)))
        filled, saving = fill_together(problem, found, check)
        assert filled.excess == check(filled.homes, saving)
        fitted.append(filled.excess.fits)
        for other in found if filled.excess.fits else ():
            beside = fill_homes(problem, lambda homes, check=check, other=other: check(homes, other))  # type: ignore[misc]
            cost = together_seconds(problem, beside.homes, other)
            assert not beside.excess.fits or together_seconds(problem, filled.homes, saving) <= cost
    assert fitted == sorted(fitted), "what a smaller budget has room for, a larger one has"
    filled, saving = fill_together(problem, found, within(problem, saved, states + saved))
    assert saving == KEPT


def test_what_runs_again_is_counted_with_compute_and_with_the_links_of_its_parameters() -> None:
    problem = training(seed=1, blocks=2, tiers=2)
    far, near = problem.tiers[-1], problem.tiers[0]
    (unit, *_) = problem.units
    again = Again(blocks=1, seconds=100.0, fetched={unit.name: 10**12})
    (saving,) = beside(again, [KEPT])
    for tier in (near, far):
        homes = farthest(problem)
        homes = dataclasses.replace(homes, params={**homes.params, unit.name: tier})
        with_it, without = (together_seconds(problem, homes, each) for each in (saving, KEPT))
        assert with_it[0] >= problem.compute_seconds + 100
        links = problem.hops(tier, problem.device)
        assert with_it[1] - without[1] == pytest.approx(sum(link.seconds(10**12) for link in links))
