"""States that steps find as they left them, and states that somebody has replaced meanwhile."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.sharded.parameter import ShardedParameter

Change = Callable[[torch.optim.Optimizer, nn.Parameter], None]


def turned(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Put states of other strides in the place of those that are there, as a checkpoint of another program may have."""
    for name, value in optimizer.state[parameter].items():
        if value.dim():
            optimizer.state[parameter][name] = value.detach().t().contiguous().t()


def in_place(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.state[parameter]["exp_avg"].mul_(0.5)


def data(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    state = optimizer.state[parameter]["exp_avg"]
    state.data = state.detach() * 2


def dropped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    del optimizer.state[parameter]


def loaded(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


class Averaging(torch.optim.Optimizer):
    """Puts other memory, or other tensors, in the place of its states."""

    def __init__(self, params: Any, *, other: str) -> None:
        super().__init__(params, {"lr": 0.05})
        self.other = other

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p))
                following = mean * 0.9 + p.grad
                if self.other == "memory":
                    mean.data = following
                else:
                    state["exp_avg"] = following
                p.add_(following, alpha=-group["lr"])


ADAMW = partial(torch.optim.AdamW, lr=0.05)


def train(
    change: Change, *, compiled: bool, kind: Callable[..., torch.optim.Optimizer] = ADAMW
) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    options = {"compute": "fx", "params": "device"}
    call: Any = torch.compile(model, backend="zero_infinity", options=options) if compiled else model
    optimizer = kind(model.parameters())
    held = 0
    for step in range(7):
        if step in (2, 3, 5):
            change(optimizer, model[0].weight)
        call(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if compiled:
            held = zinf_compile.stats(model)["memory"]["device"]["now"]["states"]
    states = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return [*(p.detach().clone() for p in model.parameters()), *states], held


class Copying(UserDict[str, Any]):
    """States that everybody gets a copy of, as those that lie elsewhere."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).clone()


def copied(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    if isinstance(parameter, ShardedParameter):  # eager would lose what it changes in place
        optimizer.state[parameter] = Copying(optimizer.state[parameter])


@pytest.mark.parametrize("change", [turned, in_place, data, dropped, loaded, copied])
def test_replaced_states_are_those_that_the_step_updates(change: Change) -> None:
    expected, _ = train(change, compiled=False)
    found, held = train(change, compiled=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # a lost state is 0.01 off: steps are of 0.05
    assert held == 2 * 4 * sum(t.numel() for t in expected[:4])


@pytest.mark.parametrize("other", ["memory", "tensor"])
def test_what_the_step_puts_in_the_place_of_a_state_is_kept(other: str) -> None:
    kind = partial(Averaging, other=other)
    expected, _ = train(in_place, compiled=False, kind=kind)
    found, held = train(in_place, compiled=True, kind=kind)
    for one, expected_one in zip(found, expected, strict=True):
        torch.testing.assert_close(one, expected_one, rtol=1e-4, atol=1e-5)
    assert held == 4 * sum(t.numel() for t in expected[:4])
