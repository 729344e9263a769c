"""Models and batches that have next to nothing: no parameters, no tensors, no rows, one row; run by operator and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, IN, Mlp, tokens, vectors
from near import assert_gradients_near, assert_near
from torch import nn
from training import twins

from zinf_compile import UnsupportedModelError

compute = pytest.mark.parametrize("compute", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
MOSTLY_FX = pytest.mark.parametrize("compute", ["fx", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.thorough])])


def compiled(model: Any, compute: str, **settings: Any) -> Any:
    return torch.compile(model, backend="zero_infinity", options={"compute": compute, "bucket": 300}, **settings)


class WithoutParameters(nn.Module):
    """Returns a sum and a view."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.sin(x) @ x.t()).sum(), x.t()


@compute
@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
def test_a_model_without_parameters(compute: str, shape: tuple[int, ...]) -> None:
    model = WithoutParameters()
    call = compiled(model, compute)
    x, y = (torch.ones(shape, requires_grad=True) for _ in range(2))
    (found, view), (expected, _) = call(x), model(y)
    assert_near("sum", found, expected)
    assert view.shape == shape[::-1]
    found.backward()
    expected.backward()
    assert_near("gradient", x.grad, y.grad)
    with torch.no_grad():
        assert_near("sum without gradients", call(x)[0], expected)


@compute
def test_parameters_that_the_optimizer_gets_and_no_graph_uses(compute: str) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = Unused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, requires_grad=True)
    compiled(model, compute)(x).sum().backward()
    optimizer.step()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


class Numbers(nn.Module):
    """Computes with numbers alone, between two breaks of the graph, and at its end with a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows = x.shape[0]
        torch._dynamo.graph_break()
        number = rows * 3 + 1
        torch._dynamo.graph_break()
        return self.layer(x) * number, number


@compute
def test_graphs_without_tensors(compute: str) -> None:
    assert compiled(lambda n: n * 2 + 1, compute)(3) == 7
    assert compiled(lambda n: n * 2 + 1, compute, dynamic=True)(4) == 9
    assert torch.equal(compiled(lambda: torch.ones(3) * 2, compute)(), torch.full((3,), 2.0))
    eager, ours = twins(Numbers)
    call = compiled(ours, compute, dynamic=True)
    for rows in (3, 5, 1, 0):
        found, number = call(torch.ones(rows, 4))
        assert number == rows * 3 + 1
        assert_near("result", found, eager(torch.ones(rows, 4))[0])


def batch_of(name: str, rows: int) -> tuple[torch.Tensor, ...]:
    return tokens(rows, rows=rows) if name in ("attention", "tied") else vectors(rows, rows=rows)


def assert_trains(name: str, compute: str, sizes: tuple[int, ...], loss: Callable[[Any], Any] = lambda value: value) -> None:
    eager, ours = twins(CASES[name].build)
    call = compiled(ours, compute)
    for rows in sizes:
        losses = [loss(model(*batch_of(name, rows))) for model in (call, eager)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0, equal_nan=True)
        for value in losses:
            value.backward()
        expected = {key: p.grad for key, p in eager.named_parameters()}
        if rows:
            assert_gradients_near(ours, expected, f"{rows} rows")
        else:
            for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, equal_nan=True)  # type: ignore[union-attr, operator]
        eager.zero_grad()
        ours.zero_grad()


@MOSTLY_FX
@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (3, 5, 1)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "attention", "tied"])
def test_batches_of_one_row_before_and_after_others(name: str, sizes: tuple[int, ...], compute: str) -> None:
    assert_trains(name, compute, sizes)


@MOSTLY_FX
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (3, 5, 0, 4)], ids=str)
@pytest.mark.parametrize("name", ["attention", "tied"])
def test_batches_without_rows_before_and_after_others(name: str, sizes: tuple[int, ...], compute: str) -> None:
    assert_trains(name, compute, sizes)


@compute
def test_an_empty_batch_that_pytorch_cannot_trace_is_named(compute: str) -> None:
    """The mean of no squared errors divides by zero in PyTorch's own tracing, with any backend."""
    model = Mlp()
    call = compiled(model, compute)
    with pytest.raises(UnsupportedModelError, match=r"for input x, shape \[0, 7\], which has no elements \(ZeroDivisionError"):
        call(*vectors(0, rows=0))
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    call(*vectors(0)).backward()
    assert model.first.weight.shape == (13, IN)
