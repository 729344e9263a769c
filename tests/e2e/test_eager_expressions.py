"""Eager code of one process that computes from a parameter off the device, further from the result, and takes its gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import IN, Mlp
from stepped_pairs import Pair
from torch import nn
from training import assert_same, whole_gradient
from twin_models import whole

pytestmark = [pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"), pytest.mark.keeps_graphs]

EXPRESSIONS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "beside its own shape": lambda w, x: x + w,
    "beside its own shape, behind another": lambda w, x: w * 2 + x,
    "transposed": lambda w, x: w.t() @ x,
    "scaled": lambda w, x: nn.functional.linear(x, w * 0.5),
    "symmetric": lambda w, x: w + w.t(),
    "rows": lambda w, x: w[1:3] * x[1:3],
    "rows of a product": lambda w, x: (w * 2)[1:3] * x[1:3],
    "flat": lambda w, x: w.view(-1)[:5] * 2,
    "halves": lambda w, x: sum(half.square().sum() for half in w.chunk(2)) * x,
    "mean of columns": lambda w, x: (w * 2).mean(0) * x,
    "softmax": lambda w, x: w.exp().softmax(0) + x,
    "normalized rows": lambda w, x: w / w.norm(dim=1, keepdim=True) @ x,
    "beside others": lambda w, x: torch.cat([w * 2, w, x, w.t()]),
}


@pytest.mark.parametrize("trains", [False, True], ids=["x is data", "x is trained"])
@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_and_its_gradients(expression: Callable[[Any, Any], Any], trains: bool, drive: Path) -> None:
    pair = Pair(drive, build=lambda: Mlp(IN), train=False)
    x, found = torch.randn(IN, IN), []
    for model in pair.models:
        if model is pair.ours:
            model(torch.randn(3, IN), torch.randn(3, 5)).backward()
            model.zero_grad()
        weight, beside = model.get_parameter("first.weight"), x.clone().requires_grad_(trains)
        result = expression(weight, beside)
        result.square().sum().backward()
        with torch.no_grad():
            again = whole(expression(weight, beside))
        found.append((whole(result).detach(), again, whole_gradient(weight), beside.grad if trains else None))
    for name, one, other in zip(("value", "value without gradients", "gradient", "gradient of x"), *found, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert_same(name, one, other)


def test_a_view_of_a_copy_is_not_written_to(drive: Path) -> None:
    pair = Pair(drive, build=lambda: Mlp(IN))
    weight = pair.ours.get_parameter("first.weight")
    for view in (weight[1:3], (weight * 2)[1:3], weight.chunk(2)[0]):
        with pytest.raises(RuntimeError, match=r"is a view and is being modified inplace"):
            view.zero_()
        with torch.no_grad():
            view.zero_()
        with pytest.raises(RuntimeError, match=r"has been modified inplace"):
            view.sum().backward()
