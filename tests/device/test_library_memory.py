"""What libraries keep of the device's memory is taken before memory is measured: once for each stream, and nothing else stays."""

from __future__ import annotations

import late
import pytest
import torch

from zinf_compile.runtime.system import library_memory
from zinf_compile.runtime.system.library_memory import take_workspaces

LATE = torch.device("late:0")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Return a list that grows by one for each time that matrices are multiplied."""
    multiply, seen = library_memory._multiply, list[torch.device]()

    def noted(one: torch.Tensor) -> torch.Tensor:
        seen.append(one.device)
        return multiply(one)

    monkeypatch.setattr(library_memory, "_multiply", noted)
    monkeypatch.setattr(library_memory, "_taken", set())
    return seen


def test_products_of_each_type_are_computed_forwards_and_backwards_once_for_each_stream(products: list[torch.device]) -> None:
    held = torch.accelerator.memory_allocated()
    for stream in (torch.accelerator.current_stream(), torch.Stream(LATE)):
        with stream:
            for _ in range(2):
                take_workspaces(LATE)
    torch.accelerator.synchronize()
    assert products == [LATE] * 8
    assert torch.accelerator.memory_allocated() == held
    assert late.defects() == []


def test_a_device_that_is_host_memory_has_none(products: list[torch.device]) -> None:
    take_workspaces(torch.device("cpu"))
    assert products == []
