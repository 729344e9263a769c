"""Code that PyTorch's own backends compile and that uses partitioned parameters: those calls run eagerly, between two graphs."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx

BACKENDS = ["inductor", "aot_eager", "eager"]


def trained(model: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    compiled: Any = torch.compile(model, backend="zero_infinity", options={"compute": "fx", "params": "device", **options})
    compiled(x).sum().backward()
    model.zero_grad()
    return model


def penalty(model: nn.Sequential, scale: torch.Tensor) -> torch.Tensor:
    return scale.exp() * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def of_bias(model: nn.Sequential, scale: torch.Tensor) -> torch.Tensor:
    model[0].weight.grad = None
    return (model[0].bias * 2 + scale).sum()


def forward(model: nn.Sequential, scale: torch.Tensor) -> torch.Tensor:
    return (model(torch.ones(3, 6)) * scale).sum()


def norms(model: nn.Sequential, scale: torch.Tensor) -> torch.Tensor:
    return torch.stack([p.norm() for p in model.parameters()]).sum() * scale


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [penalty, of_bias, forward, norms])
def test_values_and_gradients_are_those_of_eager(function: Any, backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    reference = copy.deepcopy(model)
    trained(model, torch.ones(3, 6))
    scale = torch.tensor(0.7)
    for _ in range(2):
        found, expected = torch.compile(function, backend=backend)(model, scale), function(reference, scale)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None and theirs.grad is not None:
                torch.testing.assert_close(mine.grad + 0, theirs.grad)  # a plain one, of whatever class it is


def test_the_whole_model_by_inductor_after_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).eval()
    expected = model(torch.ones(3, 6)).detach()
    trained(model, torch.ones(3, 6))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model)(torch.ones(3, 6)), expected)


def test_parameters_on_a_drive(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    reference = copy.deepcopy(model)
    trained(model, torch.ones(3, 6), params="nvme", nvme=str(tmp_path))
    scale = torch.tensor(0.7)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(penalty)(model, scale), penalty(reference, scale))
        torch.testing.assert_close(torch.compile(forward)(model, scale), forward(reference, scale))


def test_a_partial_of_inductor_and_explain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    reference = copy.deepcopy(model)
    trained(model, torch.ones(3, 6))
    scale = torch.tensor(0.7)
    backend = functools.partial(compile_fx, config_patches={"max_autotune": False})
    torch.testing.assert_close(torch.compile(penalty, backend=backend)(model, scale), penalty(reference, scale))
    assert torch._dynamo.explain(of_bias)(model, scale).graph_count == 0  # none that reads the parameter


def test_one_whole_graph_is_refused() -> None:
    model = trained(nn.Sequential(nn.Linear(6, 10)), torch.ones(3, 6))
    with pytest.raises(Exception, match="partitioned is used in code that another backend compiles"):
        torch.compile(of_bias, fullgraph=True)(model, torch.ones(()))
