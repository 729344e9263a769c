"""What ranks do in test_eager_expressions_on_ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from eager_expressions import ROWS, WIDTH, Expressions, Products, trained
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
    Products.apply,
)
"""Writes to copies, or to parts of them, which would be lost; and a gradient that would be each rank's own."""


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
