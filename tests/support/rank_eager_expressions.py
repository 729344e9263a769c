"""What ranks do in test_eager_expressions_on_ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from eager_expressions import ROWS, WIDTH, Expressions, trained
from torch import nn
from training import BACKEND

import zinf_compile


def train(rank: int, world: int, options: dict[str, Any]) -> None:
    """Train beside eager PyTorch, each rank on its own batches."""
    losses, values = trained(world, rank, options)
    expected, eager = trained(world, rank, None)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    if rank == 0:
        torch.testing.assert_close(values, eager, rtol=1e-10, atol=1e-12)


def _zeroed_without_gradients(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter[1:3].zero_()


def _zeroed_in_inference_mode(parameter: nn.Parameter) -> None:
    with torch.inference_mode():
        parameter[1:3].zero_()


WRITES = (
    lambda p: p[1:3].zero_(),
    _zeroed_without_gradients,
    lambda p: nn.functional.dropout(p.detach(), inplace=True),
    _zeroed_in_inference_mode,
    lambda p: p.detach()[1:3],
)
"""Writes to copies, or to parts of them, which would be lost."""


def write(rank: int, world: int) -> list[str]:
    """Write in eager code of a forward to what was gathered for it; return the errors, or what took no error."""
    torch.manual_seed(0)
    model = Expressions()
    model.compile(backend=BACKEND, options={})
    x = torch.randn(ROWS, WIDTH)
    model.eval()(x).backward()
    before = zinf_compile.full_state_dict(model)
    found = []
    for act in WRITES:
        model.train().inner.besides = torch.compiler.disable(act)
        try:
            model(x)
            found.append(f"{act} raised nothing")
        except (RuntimeError, zinf_compile.PartitionedParameterError) as error:
            found.append(str(error))
    after = zinf_compile.full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return found


class _Identity(torch.autograd.Function):
    """A function that hides from PyTorch what it makes of a parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return torch.ones(parameter.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1


def differentiate(rank: int, world: int) -> list[Any]:
    """Take gradients that each rank computes for itself; return, of two parameters' elements, the means, and an error."""
    torch.manual_seed(0)
    model = Expressions()
    model.compile(backend=BACKEND, options={})
    model.eval()(torch.randn(ROWS, WIDTH)).backward()
    model.zero_grad()
    learns, frozen = model.inner.long, model.inner.scale
    for parameter, uses in ((learns, 1), (learns, 2), (frozen.requires_grad_(), 1)):  # the second adds to what the first left
        sum((_Identity.apply(parameter) * (rank + 1)).sum() for _ in range(uses)).backward()
    mixed = (_Identity.apply(learns) * (rank + 1)).sum() + learns.sum() * (rank + 1)
    (added,) = torch.autograd.grad(mixed, learns)
    found = [grad.full_tensor() for grad in (learns.grad, frozen.grad, added)]
    with zinf_compile.gathered(model):
        if rank == 0:  # alone
            (own,) = torch.autograd.grad((_Identity.apply(learns) * 5).sum(), learns)
            assert torch.equal(own, torch.full(learns.shape, 5.0))
    (first,) = torch.autograd.grad((_Identity.apply(learns) ** 2).sum(), learns, create_graph=True)
    try:
        first.sum().backward()
        error = "nothing was raised"
    except zinf_compile.UnsupportedModelError as caught:
        error = str(caught)
    return [*(set(value.flatten().tolist()) for value in found), error]
