"""Host memory that the system doesn't lock: training goes on, with the same bits, and says once what that costs."""

from __future__ import annotations

import late
import pytest
import torch
from gradient_cases import train

from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.system import page_locked

HOST = {"params": "host", "grads": "host", "optimizer": "host"}


def test_a_refusal_is_said_once_and_changes_no_bits(caplog: pytest.LogCaptureFixture) -> None:
    page_locked._told.clear()
    expected = train("cpu", None).losses
    with late.delays(0.001, seed=1), late.pinned_limit(0):
        found = train("late", HOST).losses
        assert late.defects() == []
    assert all(map(torch.equal, found, expected))
    (warning,) = [record.message for record in caplog.records if "refuses to lock" in record.message]
    assert "copies to and from the device are slower" in warning


def test_no_copy_of_a_step_is_of_other_memory() -> None:
    train("late", HOST, steps=1)
    assert late.counters()["copies of unpinned memory"] == 0, "not in the first step either"


def test_what_does_not_fit_into_a_pinned_arena_is_pinned_and_used_again() -> None:
    memory = GatherMemory(pinned=True)
    kept = [memory.lend(10_000, torch.float32) for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in kept]
    assert all(tensor.is_pinned() for tensor in kept)
    del kept[1]
    kept.append(memory.lend(10_000, torch.float32))
    assert kept[-1].data_ptr() == addresses[1]
    most = memory.held_bytes()
    del kept[1:]
    kept.append(memory.lend(20_000, torch.float32))
    assert kept[-1].is_pinned()
    assert memory.held_bytes() <= most
    kept.clear()
    memory.clear()
    assert memory.held_bytes() == 0
