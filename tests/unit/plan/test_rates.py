"""Rates by which decisions are made: a machine's profile says all, what was measured comes next, the rest is rough."""

from __future__ import annotations

import pytest
import torch

from zinf_compile.ir.device_rates import TYPES, DeviceRates
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.rates import Rates

TIERS = (Tier.DEVICE, Tier.HOST, Tier.NVME)
MEASURED = DeviceRates(to_device=3e9, to_host=4e9, flops={"bfloat16": 5e13})


def by_name(rates: Rates) -> dict[str, float]:
    return {link.name: link.bytes_per_second for link in rates.links(TIERS, 2)}


def test_what_was_measured_takes_the_place_of_rough_rates() -> None:
    rough, found = Rates.of("cuda", None), Rates.of("cuda", None, MEASURED)
    before, after = by_name(rough), by_name(found)
    assert after == before | {"host to device": 3e9, "device to host": 4e9}
    assert found.flops(torch.bfloat16) == 5e13 != rough.flops(torch.bfloat16)
    assert found.flops(torch.float32) == rough.flops(torch.float32)
    assert found.bytes == rough.bytes


def test_a_profile_says_all() -> None:
    alone, beside = Rates.of("cuda", "h100"), Rates.of("cuda", "h100", MEASURED)
    assert by_name(alone) == by_name(beside) != by_name(Rates.of("cuda", None, MEASURED))
    assert all(alone.flops(getattr(torch, name)) == beside.flops(getattr(torch, name)) for name in TYPES)


@pytest.mark.parametrize("rates", [DeviceRates(), MEASURED, DeviceRates(to_host=1.0, flops=dict.fromkeys(TYPES, 2.0))])
def test_ranks_exchange_rates_as_numbers(rates: DeviceRates) -> None:
    assert DeviceRates.of_row(rates.row()) == rates
