"""Costs from what links moved, and problems made with them."""

from __future__ import annotations

import pytest
from plan_cases import read_only, training

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.costs import LARGE_BYTES, MOST_LATENCY, Costs, LinkCost, link_cost
from zinf_compile.plan.problem_parts import Link

LINK = Link(name="read", source=Tier.NVME, destination=Tier.DEVICE, bytes_per_second=1e9, latency_seconds=1e-5)


def test_a_rate_is_that_of_the_time_in_which_the_link_was_busy() -> None:
    size = 2 * LARGE_BYTES
    transfers = [(0.0, 2.0, size), (1.0, 3.0, size), (10.0, 11.0, size)]
    cost = link_cost(transfers, LINK)
    assert cost == LinkCost(pytest.approx(3 * size / 4.0, rel=1e-4), 1e-5), "what overlaps counts once, pauses not at all"
    small = [(20.0, 20.0002, 10), (21.0, 21.0004, 10)]
    again = link_cost([*transfers, *small], LINK)
    assert again is not None
    assert again.latency_seconds == pytest.approx(0.0003 - 10 / again.bytes_per_second)
    assert link_cost(small, LINK) is None, "too little to tell"


def test_small_transfers_cost_what_they_add_to_the_time_of_the_others() -> None:
    large = [(0.0, 1e-2, 2 * LARGE_BYTES), (1e-2, 2e-2, 2 * LARGE_BYTES)]
    beside = [(1e-3, 9e-3, 10), (2e-3, 1e-2, 10)]
    cost = link_cost([*large, *beside], LINK)
    assert cost is not None
    assert cost.latency_seconds == pytest.approx(0.0, abs=1e-9), "as long as the link was busy anyway"
    cost = link_cost([*large, *beside, (2e-2, 2.3e-2, 10)], LINK)
    assert cost is not None
    assert cost.latency_seconds == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("latency", [0.0, 1e-4, 5e-3])
@pytest.mark.parametrize("small", [100, LARGE_BYTES - 1])
@pytest.mark.parametrize("often", [2, 10, 21])
def test_what_a_link_moved_takes_at_its_cost_as_long_as_it_took(latency: float, small: int, often: int) -> None:
    transfers, now = [], 0.0
    for number in range(42):
        count = LARGE_BYTES * (1 + number % 3) if number % often else small
        seconds = latency + count / 1e9
        transfers.append((now, now + seconds, count))
        now += seconds
    cost = link_cost(transfers, LINK)
    assert cost is not None
    measured = Costs(links={LINK.name: cost}).link(LINK)
    large = sum(measured.seconds(count) for _, _, count in transfers if count >= LARGE_BYTES)
    assert large == pytest.approx(sum(end - start for start, end, count in transfers if count >= LARGE_BYTES))
    if latency < MOST_LATENCY:
        assert sum(measured.seconds(count) for _, _, count in transfers) == pytest.approx(now, rel=1e-3)
        assert (cost.bytes_per_second, cost.latency_seconds) == pytest.approx((1e9, latency), rel=1e-3, abs=1e-9)


def test_problems_take_what_was_measured_and_keep_the_rest() -> None:
    problem = read_only(1, 4, 0.5)
    seconds = [0.5, *[0.0] * (problem.count - 1)]
    name = problem.links[0].name
    found = Costs(links={name: LinkCost(7.0)}).of_regions(problem, seconds)
    assert found.regions[0].seconds == 0.5
    assert found.regions[1:] == problem.regions[1:]
    assert [link.bytes_per_second for link in found.links if link.name == name] == [7.0 * problem.links[0].sharers]
    assert found.links[1:] == problem.links[1:]
    assert Costs(update_seconds=3.0).of_updates(problem) is problem, "nothing is updated"
    steps = training(3, 4, tiers=2, world=1, device=0.5, host=0.5)
    assert sum(piece.host_seconds for piece in Costs(update_seconds=3.0).of_updates(steps).pieces) == pytest.approx(3.0)
