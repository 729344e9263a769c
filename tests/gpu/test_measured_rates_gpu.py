"""What a GPU reaches is measured in milliseconds, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from zinf_compile.ir.device_rates import TYPES
from zinf_compile.runtime.device.measured_rates import measure_rates
from zinf_compile.runtime.system.library_memory import take_workspaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_rates_are_those_of_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    take_workspaces(device)
    torch.cuda.synchronize()
    held, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    found = measure_rates(device)
    assert torch.cuda.memory_allocated() == held
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(1e8 < rate < 1e12 for rate in (found.to_device, found.to_host)), found
    assert found.flops.keys() == set(TYPES)
    assert all(1e9 < rate < 1e16 for rate in found.flops.values()), found
    assert found.flops["float16"] > found.flops["float32"] / 2, found
