"""Eager code of one process that computes from a parameter off the device, further from the result, and takes its gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import IN, Mlp
from stepped_pairs import Pair
from torch.nn import functional as F
from training import BACKEND, assert_same, in_place, whole_gradient
from twin_models import whole

from zinf_compile.errors import PartitionedParameterError

pytestmark = [pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"), pytest.mark.keeps_graphs]

EXPRESSIONS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "beside its own shape": lambda w, x: x + w,
    "beside its own shape, behind another": lambda w, x: w * 2 + x,
    "transposed": lambda w, x: w.t() @ x,
    "scaled": lambda w, x: F.linear(x, w * 0.5),
    "symmetric": lambda w, x: w + w.t(),
    "rows": lambda w, x: w[1:3] * x[1:3],
    "rows of a product": lambda w, x: (w * 2)[1:3] * x[1:3],
    "flat": lambda w, x: w.view(-1)[:5] * 2,
    "halves": lambda w, x: sum(half.square().sum() for half in w.chunk(2)) * x,
    "mean of columns": lambda w, x: (w * 2).mean(0) * x,
    "softmax": lambda w, x: w.exp().softmax(0) + x,
    "normalized rows": lambda w, x: w / w.norm(dim=1, keepdim=True) @ x,
    "times a number of one more dimension": lambda w, x: w * torch.full((1, 1, 1), 2.0) + x,
    "added in place": lambda w, x: (x * 1).add_(w).mul_(w * 2),
    "broadcast, added in place": lambda w, x: x.expand(2, IN, IN).clone().add_(w * 2),
    "multiplied in place": lambda w, x: x.detach().clone().addmm_(x, w),
    "divided in place by an alias": lambda w, x: (x.detach().abs() + 1).divide_(w),
    "with itself transposed, by name": lambda w, x: w @ w.T + w.mT * x,
    "transposed alone, by name": lambda w, x: w.H * w.mH.real + x,
    "largest of rows": lambda w, x: (w * 2).max(1)[0] * x,
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


@pytest.mark.parametrize(
    "function",
    [
        F.softplus, F.leaky_relu, F.elu, F.celu, F.selu, F.hardtanh, F.relu6, F.mish, F.hardsigmoid, F.hardshrink, F.softshrink,
        F.hardswish, F.gelu, F.silu, F.logsigmoid, torch.erf, torch.abs, torch.expm1, torch.sign,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_functions_of_single_elements_and_their_gradients(function: Callable[[Any], Any], drive: Path) -> None:
    pair = Pair(drive, build=lambda: Mlp(IN))
    x = torch.randn(3, IN)
    pair.each(lambda model, _: (x @ function(model.first.weight * 0.7)).square().sum().backward())


@pytest.mark.parametrize("options", [{}, {"params": "nvme"}], ids=["on the device", "on a drive"])
def test_a_backward_of_what_was_made_before_the_first_call_finds_values(options: dict[str, str], drive: Path) -> None:
    model = Mlp(IN)
    value = model.first.weight.detach().clone()
    model.compile(backend=BACKEND, options={**options, **({"nvme": str(drive)} if options else {})})
    x = torch.randn(IN, IN, requires_grad=True)
    early = (x * model.first.weight).sum()  # which autograd keeps the parameter itself for
    model(torch.randn(3, IN), torch.randn(3, 5)).backward()
    early.backward()
    assert torch.equal(x.grad, value)  # type: ignore[arg-type]


def test_without_values_elsewhere_results_need_no_storage() -> None:
    model = in_place(Mlp(IN))
    model(torch.randn(3, IN), torch.randn(3, 5)).backward()
    weight, x = model.get_parameter("first.weight"), torch.randn(3, IN)
    assert torch.equal(weight.to_sparse().to_dense(), weight)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(lambda row: F.linear(row, weight))(x), F.linear(x, weight))


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
    with torch.inference_mode(), pytest.raises(PartitionedParameterError, match=r"returns a part of a copy"):
        (weight * 2)[1:3]
