"""On one rank a step returns while its last gradients leave the device: what is updated by then goes back to it meanwhile."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from named_cap import named_cap
from tiers import context_of
from torch import nn
from torch.nn import functional as F
from training import BACKEND, adamw, assert_same

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.lanes import lanes
from zinf_compile.runtime.lanes.lanes import Pending

WORDS, WIDTH, TOKENS, SECONDS = 512, 64, (3, 5), 20.0
FAR: dict[str, Any] = dict.fromkeys(("params", "grads", "optimizer"), "host") | {
    "bucket": 4 * WIDTH * WIDTH,
    "compute_shape": {"piece_numel": 1 << 14},
}


class Words(nn.Module):
    """The embedding is used first, and its gradient is the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, torch.ones_like(x))


class Gate:
    """Holds back the copy of the embedding's gradient until it is opened."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.link = device.links["to host"]
        self._copy = self.link.copy
        self.link.copy = self._held  # type: ignore[method-assign]

    def _held(self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor], after: Pending | None) -> Pending:
        if any(source.numel() == WORDS * WIDTH for source in sources):
            after = _Behind(after, self.opened)
        return self._copy(sources, into, after)


class _Behind:
    def __init__(self, after: Pending | None, opened: threading.Event) -> None:
        self._after, self._opened = after, opened

    def wait(self) -> None:
        if self._after is not None:
            self._after.wait()
        assert self._opened.wait(SECONDS), "somebody waits for this gradient"


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulating(SimulatedDevice()) as simulated:
        yield simulated


@pytest.fixture
def gate(device: SimulatedDevice) -> Iterator[Gate]:
    made = Gate(device)
    yield made
    made.opened.set()


class Twins:
    """An eager model and ours."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.eager = Words()
        self.ours = copy.deepcopy(self.eager)
        self.call: Callable[[torch.Tensor], torch.Tensor] = torch.compile(self.ours, backend=BACKEND, options=FAR | options)
        self.optimizers = adamw(self.eager.parameters()), adamw(self.ours.parameters())

    def first_step(self) -> None:
        """Take a step before anything is held back: parameters go to host memory by the same link."""
        self.backward(100)
        self.step()

    def backward(self, number: int) -> None:
        for model in (self.eager, self.call):
            model(batch(number)).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare(self) -> None:
        state = zinf_compile.full_state_dict(self.ours)
        for name, value in self.eager.state_dict().items():
            assert_same(name, value, state[name])


def batch(number: int) -> torch.Tensor:
    return torch.randint(WORDS, TOKENS, generator=torch.Generator().manual_seed(number))


def eventually(check: Callable[[], bool]) -> bool:
    end = time.monotonic() + SECONDS
    while not check() and time.monotonic() < end:
        time.sleep(0.005)
    return check()


def test_the_next_forward_brings_units_while_the_last_gradient_leaves(device: SimulatedDevice, gate: Gate) -> None:
    twins = Twins()
    for number in range(2):
        twins.backward(number)
        twins.step()
    zinf_compile.synchronize()
    before, seen = device.links["to device"].bytes, list[torch.Tensor]()
    gate.opened.clear()
    twins.backward(2)
    gradient = twins.ours.embedding.weight.grad
    twins.step()
    assert gradient.offloaded.under_way is not None, "the step has returned before it is there"  # type: ignore[union-attr]
    forward = threading.Thread(target=lambda: seen.append(twins.call(batch(3)).detach()))
    forward.start()
    layers = sum(layer.weight.nbytes for layer in twins.eager.layers)
    assert eventually(lambda: device.links["to device"].bytes >= before + 2 * layers), "of the backward, and of this forward"
    assert forward.is_alive(), "the embedding is still to be updated"
    gate.opened.set()
    forward.join(SECONDS)
    assert_same("loss", twins.eager(batch(3)).detach(), seen[0])
    twins.compare()


def test_clipping_keeps_nobody_either(device: SimulatedDevice, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step that clips on: norms are taken before gradients leave, and each is scaled once it is there."""
    monkeypatch.setattr(lanes, "PATIENCE_S", SECONDS)  # however slow this machine is
    twins = Twins()

    def clip() -> None:
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 1e-3) for model in (twins.eager, twins.ours)]
        assert_same("norm", norms[0], norms[1])

    for number in range(2):
        twins.backward(number)
        clip()
        twins.step()
    zinf_compile.synchronize()
    before, seen = device.links["to device"].bytes, list[torch.Tensor]()
    gate.opened.clear()
    twins.backward(2)
    gradients = [parameter.grad for parameter in twins.ours.parameters()]
    clip()
    twins.step()
    assert gradients[0].offloaded.under_way is not None, "the step has returned before it is there"  # type: ignore[union-attr]
    forward = threading.Thread(target=lambda: seen.append(twins.call(batch(3)).detach()))
    forward.start()
    layers = sum(layer.weight.nbytes for layer in twins.eager.layers)
    assert eventually(lambda: device.links["to device"].bytes >= before + 2 * layers), "of the backward, and of this forward"
    assert forward.is_alive(), "the embedding is still to be updated"
    for gradient in gradients:  # nobody's any more: the step applies what they were
        assert gradient is not None
        gradient.mul_(3.0)
    gate.opened.set()
    forward.join(SECONDS)
    assert_same("loss", twins.eager(batch(3)).detach(), seen[0])
    twins.compare()


def test_memory_stays_within_the_cap(device: SimulatedDevice, gate: Gate) -> None:
    """Compute waits until the gradient has left, where it has no room beside it."""
    with pytest.raises(BudgetError) as refusal:
        Twins(device_memory=1).backward(0)
    cap = named_cap(refusal.value)
    twins = Twins(device_memory=cap)
    twins.first_step()
    for number in range(3):
        gate.opened.clear()
        opening = threading.Timer(0.2, gate.opened.set)
        opening.start()
        twins.backward(number)
        twins.step()
        opening.join()
    twins.backward(9)
    twins.step()
    twins.compare()
    memory = context_of(twins.ours).memory
    assert memory.ledger.total()[1] <= cap
    assert memory.inflight_gradients.held == 0


@pytest.mark.parametrize("change", ["scaled", "accumulated", "clipped", "replaced"])
def test_a_gradient_that_is_changed_before_the_step_is_waited_for(change: str, device: SimulatedDevice, gate: Gate) -> None:
    twins = Twins()
    twins.first_step()
    for number in range(3):
        gate.opened.clear()
        twins.backward(number)
        opening = threading.Timer(0.05, gate.opened.set)
        opening.start()
        if change == "accumulated":
            twins.backward(number + 10)
        for model in (twins.eager, twins.ours):
            if change == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            for parameter in model.parameters() if change in ("scaled", "replaced") else ():
                assert parameter.grad is not None
                if change == "scaled":
                    parameter.grad.mul_(0.5)
                else:
                    parameter.grad = parameter.grad * 2.0
        twins.step()
        opening.join()
    twins.compare()


@pytest.mark.parametrize("pieces", [1 << 12, 1 << 20])
def test_clipped_ones_are_zeroed_and_added_to_while_the_last_one_leaves(pieces: int, device: SimulatedDevice, gate: Gate) -> None:
    """What waits for the step comes behind what the step waits for, whether chunks are of one parameter or of all."""
    twins = Twins(compute_shape={"piece_numel": pieces})
    for number in range(5):
        if number:
            gate.opened.clear()
        twins.backward(number)
        for model in (twins.eager, twins.ours):
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                nn.utils.clip_grad_value_(model.parameters(), 1e-4)
            for parameter in model.parameters() if number % 2 == 0 else ():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
        threading.Timer(0.1, gate.opened.set).start()
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert gate.opened.wait(SECONDS)
    twins.compare()


def test_a_gradient_that_is_changed_behind_the_step_changes_nothing(device: SimulatedDevice, gate: Gate) -> None:
    twins = Twins()
    twins.first_step()
    for number in range(3):
        gate.opened.clear()
        twins.backward(number)
        gradients = [[p.grad for p in model.parameters()] for model in (twins.eager, twins.ours)]
        twins.step()
        threading.Timer(0.05, gate.opened.set).start()
        for own in gradients:
            for gradient in own:
                assert gradient is not None
                gradient.mul_(3.0)
    twins.compare()
