"""On one rank a forward leaves on the device what its backward begins with: it crosses the link once, and no graph sees more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import context_of
from torch import nn
from torch.nn import functional as F
from training import BACKEND, adamw, assert_same

import zinf_compile
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

WORDS, WIDTH, TOKENS = 37, 16, (3, 5)
FAR = dict.fromkeys(("params", "grads", "optimizer"), "host") | {"bucket": 512}


class Words(nn.Module):
    """A head that is used at the end of the forward and at the beginning of the backward; tied to the embedding if asked for."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.inner(self.embedding(tokens))))
        return found


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulating(SimulatedDevice()) as simulated:
        yield simulated


def batch(number: int) -> torch.Tensor:
    return torch.randint(WORDS, TOKENS, generator=torch.Generator().manual_seed(number))


def pair(**given: Any) -> tuple[Words, Words, Any]:
    torch.manual_seed(3)
    eager = Words(**given)
    ours = copy.deepcopy(eager)
    return eager, ours, torch.compile(ours, backend=BACKEND, options=FAR)


def assert_same_gradients(eager: nn.Module, ours: nn.Module) -> None:
    for (name, expected), found in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert_same(name, expected.grad, found.grad.full_tensor())  # type: ignore[attr-defined]


def crossed(device: SimulatedDevice) -> int:
    zinf_compile.synchronize()
    return device.links["to device"].bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_head_crosses_once_and_the_bits_are_those_of_eager(tied: bool, autocast: bool, device: SimulatedDevice) -> None:
    eager, ours, call = pair(tied=tied)
    optimizers = adamw(eager.parameters()), adamw(ours.parameters())
    moved = []
    for step in range(4):
        before = crossed(device)
        for model, optimizer in zip((eager, call), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss_of(model, batch(step)).backward()
            optimizer.step()
        assert_same_gradients(eager, ours)
        moved.append(crossed(device) - before)
    inner, head = ours.inner.weight.numel() + ours.inner.bias.numel(), ours.head.weight.numel()
    times = 1 if tied and not autocast else 2  # the lookup is in full precision
    assert moved[-1] <= 4 * (2 * inner + times * head), "in the forward, and what the backward doesn't begin with"
    assert not context_of(ours).full_copies


def test_another_graph_in_between_has_nothing_beside_its_own(device: SimulatedDevice) -> None:
    (eager, ours, call), (other_eager, other, other_call) = pair(), pair(tied=True)
    for step in range(3):
        before = crossed(device)
        for one, two in ((eager, other_eager), (call, other_call)):
            first, second = loss_of(one, batch(step)), loss_of(two, batch(step + 10))
            first.backward()
            second.backward()
        assert_same_gradients(eager, ours)
        assert_same_gradients(other_eager, other)
        assert not context_of(ours).full_copies
    assert crossed(device) - before >= 4 * 4 * (ours.inner.weight.numel() + ours.head.weight.numel())


def test_a_forward_that_nothing_follows_leaves_one_set_at_most(device: SimulatedDevice) -> None:
    eager, ours, call = pair()
    for step in range(2):
        for model in (eager, call):
            loss_of(model, batch(step)).backward()
    kept = [loss_of(call, batch(step)) for step in range(3)]
    assert context_of(ours).full_copies.bytes == ours.head.weight.numel() * 4
    with torch.no_grad():
        call(batch(7))
    assert not context_of(ours).full_copies, "another graph began"
    for number, loss in enumerate(kept):
        loss.backward()
        loss_of(eager, batch(number)).backward()
    assert_same_gradients(eager, ours)


def test_a_step_between_forward_and_backward_leaves_no_old_values(device: SimulatedDevice) -> None:
    _, ours, call = pair()
    optimizer = adamw(ours.parameters())
    for step in range(2):
        loss_of(call, batch(step)).backward()
        optimizer.step()
    loss_of(call, batch(5))
    assert context_of(ours).full_copies
    optimizer.step()
    zinf_compile.synchronize()
    assert not context_of(ours).full_copies


def test_a_drive_reads_it_once(tmp_path: Any) -> None:
    eager, ours, _ = pair()
    options = dict.fromkeys(("params", "grads", "optimizer"), "nvme") | {"nvme": str(tmp_path), "bucket": 512}
    call = torch.compile(ours, backend=BACKEND, options=options)
    for step in range(3):
        for model in (eager, call):
            loss_of(model, batch(step)).backward()
        assert_same_gradients(eager, ours)
    loss_of(call, batch(4))
    assert context_of(ours).full_copies.bytes == ours.head.weight.numel() * 4
