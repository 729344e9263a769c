"""Optimizers for tests: those of torch.optim with the flags that people use, and a hand-written one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from training import assert_same


class SignMomentum(Optimizer):
    """A third party's optimizer: Lion (Chen et al. 2023), written the way such are, with in-place updates of `p.data`."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["steps"] = 0
                state["steps"] += 1
                average, (one, two) = state["exp_avg"], group["betas"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.add_((average * one + p.grad * (1 - one)).sign_(), alpha=-group["lr"])
                average.mul_(two).add_(p.grad, alpha=1 - two)
        return loss


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd_nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd_fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.01, fused=True),
    "adam_amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, maximize=True, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw_foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adamax": partial(torch.optim.Adamax, lr=0.01, weight_decay=0.1),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01, t0=2),
    "third_party": SignMomentum,
}
"""By name: makes the optimizer of the parameters it is given."""


def assert_same_states(eager: Optimizer, ours: Optimizer) -> None:
    """Compare two optimizers' state dicts: keys, shapes, bits."""
    expected, found = eager.state_dict(), ours.state_dict()
    assert expected["param_groups"] == found["param_groups"]
    assert expected["state"].keys() == found["state"].keys()
    for index, state in expected["state"].items():
        assert state.keys() == found["state"][index].keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert_same(f"state {name} of parameter {index}", value, found["state"][index][name])
            else:
                assert value == found["state"][index][name]
