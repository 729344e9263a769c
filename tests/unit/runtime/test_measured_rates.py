"""Rates of a device: measured on an accelerator alone, by the fastest of some runs."""

from __future__ import annotations

import time

import pytest
import torch

from zinf_compile.ir.device_rates import DeviceRates
from zinf_compile.runtime.device import measured_rates
from zinf_compile.runtime.device.measured_rates import fastest, rates_of
from zinf_compile.runtime.device.simulated import SimulatedDevice


def test_the_cpu_is_not_measured() -> None:
    assert rates_of(torch.device("cpu")) == DeviceRates()


def test_the_first_run_does_not_count_and_each_is_waited_for() -> None:
    done: list[str] = []

    def run() -> None:
        time.sleep(0.0 if done else 0.2)
        done.append("run")

    assert fastest(run, lambda: done.append("over")) < 0.2
    assert done == ["run", "over"] * (1 + measured_rates.RUNS)


def test_a_device_is_measured_once_and_not_where_it_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda", 7), list[torch.device]()

    def measure(which: torch.device) -> DeviceRates:
        asked.append(which)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("no memory")
        return DeviceRates(to_device=1.0)

    monkeypatch.setattr(measured_rates, "_known", {})
    monkeypatch.setattr(measured_rates, "measure_rates", measure)
    assert [rates_of(device).to_device for _ in range(3)] == [0.0, 1.0, 1.0]
    assert asked == [device] * 2


def test_a_simulated_device_knows_the_speed_that_it_was_given() -> None:
    assert SimulatedDevice().rates() == DeviceRates()
    assert SimulatedDevice(bytes_per_s=5e7).rates() == DeviceRates(to_device=5e7, to_host=5e7)
