"""`torch.func` around a model that has been trained: eager PyTorch's numbers, on the device and off it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import BACKEND, whole_gradient

Model = Callable[[torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has second derivatives."""
        return torch.tanh(self.inner(x))


def total(call: Model) -> Model:
    return lambda x: call(x).square().sum()


TRANSFORMS: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "grad": lambda call, x: torch.func.grad(total(call))(x),
    "vmap": lambda call, x: torch.func.vmap(call)(x.expand(3, 2, 6)),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x.cos(),))[1],
    "vjp": lambda call, x: torch.func.vjp(call, x)[1](torch.ones(2, 5))[0],
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "jacfwd": lambda call, x: torch.func.jacfwd(call)(x),
    "hessian": lambda call, x: torch.func.hessian(total(call))(x),
    "gradients of many": lambda call, x: torch.func.vmap(torch.func.grad(total(call)))(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_transforms_of_inputs(tier: str, tmp_path: Path) -> None:
    """Also with a backward behind them, which reaches the parameters."""
    places = dict.fromkeys(("params", "grads", "optimizer"), tier)
    options: dict[str, Any] = {"compute": "fx", "nvme": str(tmp_path), **places} if tier == "nvme" else {"compute": "fx"}
    torch.manual_seed(0)
    model = Layer()
    eager = copy.deepcopy(model)
    model.compile(backend=BACKEND, options=options)
    x = torch.randn(2, 6)
    for each in (model, eager):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, transform in TRANSFORMS.items():
        torch.testing.assert_close(transform(model, x), transform(eager, x), msg=lambda text, name=name: f"{name}: {text}")
    for transform in (TRANSFORMS["vmap"], TRANSFORMS["jvp"]):
        for each in (model, eager):
            transform(each, x).sum().backward()
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(whole_gradient(mine), its.grad)
