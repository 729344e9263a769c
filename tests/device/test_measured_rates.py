"""A device's rates are measured by its own products and copies, and that leaves nothing behind."""

from __future__ import annotations

import late
import pytest
import torch

from zinf_compile.ir.device_rates import TYPES
from zinf_compile.runtime.device import measured_rates
from zinf_compile.runtime.device.measured_rates import measure_rates, rates_of

LATE = torch.device("late:0")


def test_measuring_leaves_neither_memory_nor_random_numbers_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_rates, "WIDTH", 64)
    monkeypatch.setattr(measured_rates, "COPIED", 1 << 16)
    held, state = torch.accelerator.memory_allocated(), torch.get_rng_state()
    found = measure_rates(LATE)
    torch.accelerator.synchronize()
    assert min(found.to_device, found.to_host, *found.flops.values()) > 0
    assert found.flops.keys() == set(TYPES)
    assert torch.accelerator.memory_allocated() == held
    assert torch.equal(torch.get_rng_state(), state)
    assert late.defects() == []


def test_a_device_of_another_kind_is_not_measured() -> None:
    assert not any(rates_of(LATE).row())


def test_a_type_that_the_device_cannot_multiply_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.mm

    def mm(one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if one.dtype == torch.bfloat16:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return multiply(one, other, out=out)

    monkeypatch.setattr(measured_rates, "WIDTH", 16)
    monkeypatch.setattr(measured_rates, "COPIED", 1 << 12)
    monkeypatch.setattr(torch, "mm", mm)
    assert measure_rates(LATE).flops.keys() == {"float32", "float16"}
