"""Saved values that are made again in the backward: the bits of keeping them, less memory, and nothing else changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recompute_twins import Model, Twin, Twins, batch, same, train, twins
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.steps import Region
from zinf_compile.runtime.transfer.dropped_value import DroppedValue

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Twins]:
    torch.compiler.reset()
    found: Twins = Twin("keep", Model), Twin("recompute", Model)
    yield found
    torch.compiler.reset()


def test_training(pair: Twins) -> None:
    same(pair, train)
    again = [step for step in pair[1].programs["backward"].steps if isinstance(step, Region) and step.name.endswith("again")]
    forward = {step.fn for step in pair[1].programs["forward"].steps if isinstance(step, Region)}
    assert again
    assert {step.fn for step in again} <= forward, "the same code"
    blocks = [step.name[: len("blocks.0")] for step in again]
    assert list(dict.fromkeys(blocks)) == ["blocks.2", "blocks.1", "blocks.0"], "one after the other"


def test_two_micro_batches_in_flight(pair: Twins) -> None:
    """The second forward changes the buffers that the first has read."""

    def act(twin: Twin) -> torch.Tensor:
        first, second = twin.call(*batch(1)), twin.call(*batch(2))
        first.backward()
        second.backward()
        return first + second

    same(pair, act)


def test_a_second_backward_of_one_graph(pair: Twins) -> None:
    def act(twin: Twin) -> torch.Tensor:
        loss = twin.call(*batch(1))
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    same(pair, act)


def test_a_forward_without_a_backward_and_evaluation(pair: Twins) -> None:
    def act(twin: Twin) -> torch.Tensor:
        twin.call(*batch(1))
        twin.model.eval()
        with torch.no_grad():
            twin.call(*batch(2))
        twin.model.train()
        loss = twin.call(*batch(3))
        loss.backward()
        return loss

    same(pair, act)


def test_a_step_between_forward_and_backward_is_the_error_of_pytorch(pair: Twins) -> None:
    for twin in pair:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
        twin.call(*batch(1)).backward()
        loss = twin.call(*batch(2))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        twin.model.zero_grad()


def test_an_error_in_the_backward_leaves_the_generators_state(pair: Twins) -> None:
    torch.manual_seed(3)
    pair[0].call(*batch(1))  # it changes buffers
    torch.manual_seed(3)
    twin = pair[1]
    loss = twin.call(*batch(1))
    step = next(s for s in twin.programs["backward"].steps if isinstance(s, Region) and s.name.endswith("again"))
    before = torch.get_rng_state()

    def broken(values: list[Any]) -> Any:
        torch.rand(3)
        raise ZeroDivisionError

    fn = step.fn
    object.__setattr__(step, "fn", broken)
    try:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    finally:
        object.__setattr__(step, "fn", fn)
    assert torch.equal(torch.get_rng_state(), before)
    twin.model.zero_grad()


def test_checkpoints_around_the_model_and_hooks_that_read(pair: Twins) -> None:
    def act(twin: Twin) -> torch.Tensor:
        loss: torch.Tensor = checkpoint(twin.call, *batch(1), use_reentrant=False)
        loss.backward()
        return loss

    same(pair, act)
    with save_on_cpu():  # which they are
        same(pair, act)
    reading = saved_tensors_hooks(lambda v: v if isinstance(v, nn.Parameter) else v.clone(), lambda v: v)
    with pytest.raises(UnsupportedModelError, match=r"activations='recompute'.*hooks of saved tensors"), reading:
        pair[1].call(*batch(1))
    assert "DroppedValue(value" in repr(DroppedValue.of(torch.ones(2), "value 0"))


def test_an_input_that_the_loop_refills_before_the_backward(pair: Twins) -> None:
    """Eager would not save it: what the blocks read is a copy."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x + shift)
            return x.square().mean()

    def act(twin: Twin) -> torch.Tensor:
        x, shift = torch.randn(4, 8), torch.randn(4, 8)
        loss = twin.call(x, shift)
        shift.zero_()
        loss.backward()
        return loss

    same(twins(Shifted), act)
