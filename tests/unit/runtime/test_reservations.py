"""Reservations of graphs, where a smaller cap is declared after one was planned."""

from __future__ import annotations

import dataclasses

import pytest

from zinf_compile.ir.sizes import BLOCK_BYTES, STAGING_BYTES, UNFORESEEN, Sides
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.memory.reservations import Reservation, Reservations

LEAST, PASSING = Sides(100, 10), Sides(5000, 500)


def made_within(caps: Sides) -> Reservation:
    return Reservation(
        passing=PASSING.device,
        passing_host=PASSING.host,
        left=0,
        reduced=0,
        chunk_buffers=1,
        staging=STAGING_BYTES,
        least=LEAST,
        caps=caps,
    )


@pytest.mark.parametrize(
    ("caps", "declared", "expected"),
    [
        (Sides(9000, 900), False, PASSING),  # what is free was just another number
        (Sides(9000, 900), True, LEAST),
        (Sides(8000, 900), True, Sides(PASSING.device, LEAST.host)),
        (Sides(8000, 800), True, PASSING),
        (Sides(7000, 700), True, PASSING),
    ],
)
def test_a_graph_of_larger_caps_counts_with_its_least_within_smaller_ones(caps: Sides, declared: bool, expected: Sides) -> None:
    reservations, made = Reservations(), made_within(caps)
    reservations.add(made)
    if declared:
        reservations.declare(device=8000, host=None)
    reservations.device_cap, reservations.host_cap = 8000, 800
    assert Sides(reservations.passing, reservations.passing_host) == expected
    assert reservations.passing_backward == expected.device
    assert reservations.passing_alone(lambda _: True) == expected.device
    assert reservations.passing_within(Sides(9000, 900)) == PASSING
    assert reservations.staging == (STAGING_BYTES if expected == PASSING else BLOCK_BYTES)
    assert reservations.staging_limit == reservations.staging


def test_the_cap_above_one_whose_plans_run_ahead_leaves_room_for_them_to_run_further() -> None:
    reservations = Reservations()
    made = dataclasses.replace(made_within(Sides(9000, 900)), wish=Sides(700, 70))
    assert reservations.above(Tier.DEVICE, 9000, 9010) == 9010
    reservations.add(made)
    assert reservations.above(Tier.DEVICE, 9000, 9010) == 9010 + (UNFORESEEN - 1) * 10
    assert reservations.above(Tier.DEVICE, 9000, 9900) == 9900 + 700
    assert reservations.above(Tier.HOST, 900, 990) == 990 + 70
