"""A forward and its backward planned as one, once costs are measured: units stay from one to the other where there is room."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from named_cap import named_cap
from tiers import context_of
from torch import nn
from torch.nn import functional as F
from training import BACKEND, adamw, assert_same

import zinf_compile
from zinf_compile.backend.replan import FIRST, MEASURED, replanner_of
from zinf_compile.errors import BudgetError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

LAYERS, WIDTH, ROWS = 6, 256, 16
LAYER = 4 * WIDTH * WIDTH
FAR = dict.fromkeys(("params", "grads", "optimizer"), "host") | {"bucket": LAYER, "chunk_loss": False}


class Stack(nn.Module):
    """Layers of the same size, used one after the other, and a loss; or an output, of which the caller computes one."""

    def __init__(self, *, loss: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, torch.ones_like(x)) if self.loss else x


class Training:
    """An eager model and ours, with the same losses."""

    def __init__(self, device: SimulatedDevice, **options: Any) -> None:
        torch.manual_seed(3)
        self.device = device
        self.eager = Stack()
        self.ours = copy.deepcopy(self.eager)
        self.call: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
            self.ours, backend=BACKEND, options={**FAR, "device_memory": 16 * LAYER, **options}
        )
        self.optimizers = adamw(self.eager.parameters()), adamw(self.ours.parameters())

    def step(self, number: int, *, autocast: bool = False, between: Callable[[], object] = lambda: None) -> int:
        """Take a step with both, compare gradients; return the bytes that went to the device."""
        zinf_compile.synchronize()
        before = self.device.links["to device"].bytes
        for model, optimizer in zip((self.eager, self.call), self.optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(batch(number))
            if model is self.call:
                between()
            loss.backward()
            optimizer.step()
        for (name, expected), found in zip(self.eager.named_parameters(), self.ours.parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            assert_same(name, expected.grad, found.grad.full_tensor())  # type: ignore[attr-defined]
        zinf_compile.synchronize()
        return self.device.links["to device"].bytes - before

    @property
    def changes(self) -> list[str]:
        """What was said of plans made again."""
        return replanner_of(context_of(self.ours)).changes


def batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulating(SimulatedDevice(bytes_per_s=5e7)) as simulated:
        yield simulated


@pytest.mark.parametrize("autocast", [False, True])
def test_what_has_room_crosses_once(autocast: bool, device: SimulatedDevice) -> None:
    training = Training(device)
    moved = [training.step(number, autocast=autocast) for number in range(FIRST + MEASURED + 3)]
    assert moved[FIRST + MEASURED - 1] > (LAYERS + 1) * LAYER, "the backward brings what it doesn't begin with"
    (text,) = [line for line in training.changes if "planned again" in line]
    assert "simulated forward of graph" in text
    assert " and backward of graph" in text
    assert moved[-1] == LAYERS * LAYER
    seen: list[int] = []
    training.step(99, autocast=autocast, between=lambda: seen.append(context_of(training.ours).full_copies.handed_on_bytes))
    assert seen == [(LAYERS - 1) * LAYER // (2 if autocast else 1)], "no gradient reads the first one"
    assert context_of(training.ours).memory.ledger.total()[1] <= 16 * LAYER


def test_memory_stays_within_a_cap_that_has_room_for_some(device: SimulatedDevice) -> None:
    with pytest.raises(BudgetError) as refusal:
        Training(device, device_memory=LAYER).step(0)
    cap = named_cap(refusal.value) + 3 * LAYER
    training = Training(device, device_memory=cap)
    moved = [training.step(number) for number in range(FIRST + MEASURED + 3)]
    assert LAYERS * LAYER < moved[-1] < moved[FIRST + MEASURED - 1], "fewer bytes, but not all stay"
    assert context_of(training.ours).memory.ledger.total()[1] <= cap


def test_what_another_graph_has_ended_is_brought_for_its_use(device: SimulatedDevice) -> None:
    training = Training(device)
    for number in range(FIRST + MEASURED + 1):
        training.step(number)

    def evaluate() -> None:
        assert context_of(training.ours).full_copies.handed_on_bytes
        with torch.no_grad():
            training.call(batch(5))
        assert not context_of(training.ours).full_copies

    assert training.step(50, between=evaluate) == (2 * LAYERS + LAYERS - 1) * LAYER
    assert training.step(51) == LAYERS * LAYER
    assert context_of(training.ours).memory.ledger.total()[1] <= 16 * LAYER


def test_graphs_that_others_run_between_are_planned_by_themselves(device: SimulatedDevice) -> None:
    """Nor is what a backward doesn't begin with kept while the caller computes with a large result."""
    torch.manual_seed(0)
    stacks = [Stack(loss=False), Stack(loss=False)]
    options = {**FAR, "device_memory": 40 * LAYER}
    calls = [torch.compile(each, backend=BACKEND, options=options) for each in stacks]
    optimizer = adamw([p for each in stacks for p in each.parameters()])
    for number in range(FIRST + MEASURED + 1):
        optimizer.zero_grad()
        calls[1](calls[0](batch(number))).square().mean().backward()
        optimizer.step()
    texts = [line for line in replanner_of(context_of(stacks[0])).changes if "planned again" in line]
    first, second = (f"backward of graph {number}" for number in numbers_of(stacks[0])[-2:])
    assert not any(f" and {first}" in text for text in texts), "the other graph's forward and backward come in between"
    assert any(f" and {second}" in text for text in texts)


def numbers_of(model: nn.Module) -> list[int]:
    """Return the numbers of the graphs that are planned, in the order in which they were compiled."""
    living = replanner_of(context_of(model))._living()
    return sorted({int(kept.number) for kept in living})
