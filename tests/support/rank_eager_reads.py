"""What ranks do in test_eager_reads.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import IN, Mlp, vectors
from training import BACKEND, adamw, plain_step

import zinf_compile
from zinf_compile.sharded.gradient import ShardedGradient

Act = Callable[[Any], Any]

EXACT: dict[str, Act] = {
    "absolute maximum": lambda g: g.abs().max(),
    "all": lambda g: (g == g.clone()).all(),
    "amin": torch.amin,
    "any": lambda g: (g > 0.01).any(),
    "any NaN": lambda g: g.isnan().any(),
    "count": lambda g: torch.count_nonzero(g < 0),
    "count of a comparison": lambda g: (g < 0).sum(),
    "finite": lambda g: torch.isfinite(g).all(),
    "histc": lambda g: torch.histc(g, 7),
    "histc in a range": lambda g: g.histc(5, -0.01, 0.02),
    "maximum": lambda g: g.max(),
    "minimum": lambda g: g.min(),
    "number": lambda g: g.abs().max().item(),
    "square root of a mask": lambda g: torch.masked_fill(g, g < 0, 0.0).max(),
}
ROUNDED: dict[str, Act] = {
    "mean": lambda g: g.mean(),
    "mean of squares": lambda g: g.square().mean(),
    "sum": torch.sum,
    "sum in double precision": lambda g: g.sum(dtype=torch.float64),
}
"""Sums over ranks are taken in another order. Each side rounds a sum of n terms, which may be rounded themselves, by at most
half of n + 2 epsilons of the sum of their magnitudes."""

REFUSED: dict[str, tuple[Act, str]] = {
    "bincount": (lambda g: torch.histogram(g, 4), "histogram()"),
    "deviation": (lambda g: g.std(), "std()"),
    "element": (lambda g: g[0, 0], "indexing, grad[...],"),
    "largest in each row": (lambda g: g.max(dim=1), "max()"),
    "list": (lambda g: g.tolist(), "tolist()"),
    "median": (lambda g: g.median(), "median()"),
    "numpy": (lambda g: g.numpy(), "numpy()"),
    "product": (lambda g: g @ torch.ones(IN), "mv()"),
    "quantile": (lambda g: g.sort(), "sort()"),
    "rows": (lambda g: g[:2], "indexing, grad[...],"),
    "sum of rows": (lambda g: g.sum(0), "sum()"),
    "transposed": (lambda g: g.t(), "t()"),
}

BROADCAST: dict[str, Act] = {
    "a column": lambda g: g.mul_(torch.arange(13.0).view(13, 1)),
    "a row": lambda g: g.add_(torch.arange(float(IN))),
    "a row of a matrix": lambda g: g.sub_(torch.arange(float(IN)).view(1, IN)),
    "one element": lambda g: g.div_(torch.full((1, 1), 3.0)),
    "some rows": lambda g: g.masked_fill_(torch.arange(13).view(13, 1) % 3 == 0, 2.0),
}
"""Changes by whole tensors that are broadcast."""


def read_gradients(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the error of each refusal; check numbers of gradients against those of whole gradients."""
    model: Any = Mlp()
    model.compile(backend=BACKEND, options=options)
    model(*vectors(0, rank)).backward()
    grad = model.first.weight.grad
    assert isinstance(grad, ShardedGradient)
    assert "ShardedGradient(first.weight, shape=[13, 7]" in f"{grad} {grad!r}"
    assert f"rank {rank} of {world}" in f"{model.first.weight}"
    whole = grad.full_tensor()
    for name, act in EXACT.items():
        expected, found = act(whole), act(grad)
        assert torch.equal(torch.as_tensor(expected), torch.as_tensor(found)), (name, expected, found)
    for name, act in ROUNDED.items():
        expected, found = act(whole), act(grad)
        assert found.dtype == expected.dtype, name
        terms = whole.double().square() if "squares" in name else whole.double().abs()
        bound = (whole.numel() + 2) * torch.finfo(expected.dtype).eps * (terms.mean() if "mean" in name else terms.sum())
        assert (found.double() - expected.double()).abs() <= bound, name
    for parameter in model.parameters():  # of which some ranks have no element, with its whole gradient NaN
        parameter.grad.mul_(float("nan"))
        assert bool(parameter.grad.isnan().all())
        assert bool(parameter.grad.max().isnan())

    model.zero_grad()
    model(*vectors(0, rank)).backward()
    for name, act in BROADCAST.items():
        expected, found = model.first.weight.grad.full_tensor(), model.first.weight.grad.clone()
        for changed in (expected, found):
            act(changed)
        assert torch.equal(found.full_tensor(), expected), name
    torch.manual_seed(5)
    noise = torch.randn_like(model.first.weight.grad)
    torch.manual_seed(5)
    assert torch.equal(noise.full_tensor(), torch.randn(13, IN))
    before = model.first.weight.grad.full_tensor()
    model.first.weight.grad.add_(noise, alpha=0.1)
    assert torch.equal(model.first.weight.grad.full_tensor(), torch.add(before, noise.full_tensor(), alpha=0.1))
    return {name: _error(act, model.first.weight.grad) for name, (act, _) in REFUSED.items()}


class Counted(Mlp):
    """Dynamo compiles its forward anew for each number."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: int = 1) -> torch.Tensor:
        return super().forward(x, y) * number


class TwoSteps(torch.optim.SGD):
    """Reads parameters in a method of its own."""

    def first_step(self) -> None:
        """Change parameters before the gradients are taken."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad)


def lbfgs_is_told(rank: int, options: dict[str, str]) -> tuple[dict[str, str], Any, torch.optim.Optimizer]:
    """Return what LBFGS is told before the first step and after, changing nothing; and a model and its AdamW."""
    found = {}
    model: Any = Mlp()
    model.compile(backend=BACKEND, options=options)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    lbfgs = torch.optim.LBFGS(model.parameters())
    found["LBFGS first"] = _error(lbfgs.step, closure_of(model, rank))
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    if rank == 0:
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    optimizer = adamw(model.parameters())
    plain_step(model, optimizer, vectors(0, rank))
    before = zinf_compile.full_state_dict(model)
    found["LBFGS later"] = _error(lbfgs.step, closure_of(model, rank))
    found["LBFGS made later"] = _error(torch.optim.LBFGS(model.parameters()).step, closure_of(model, rank))
    after = zinf_compile.full_state_dict(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    plain_step(model, optimizer, vectors(1, rank))
    return found, model, optimizer


def lbfgs_on_drives(rank: int, world: int, folder: str) -> dict[str, str]:
    """The same with all on NVMe."""
    return lbfgs_is_told(rank, {"compute": "fx", "nvme": folder, **dict.fromkeys(("params", "grads", "optimizer"), "nvme")})[0]


def optimizers_and_limit(rank: int, world: int) -> dict[str, str]:
    """Return what LBFGS and reads inside optimizers are told; train through more variants than PyTorch's limit."""
    found, model, optimizer = lbfgs_is_told(rank, {})

    def penalised() -> torch.Tensor:
        closure_of(model, rank)()
        return sum(p.norm() for p in model.parameters())  # type: ignore[return-value]

    found["read in a closure"] = _error(torch.optim.SGD(model.parameters(), lr=0.1).step, penalised)
    found["read in a method"] = _error(lambda o: o.first_step(), TwoSteps(model.parameters(), lr=0.1))
    plain_step(model, optimizer, vectors(1, rank))

    counted = Counted()
    compiled = torch.compile(counted, backend=BACKEND, dynamic=False)
    optimizer = adamw(counted.parameters())
    for number in range(1, 11):
        optimizer.zero_grad()
        compiled(*vectors(0, rank), number).backward()
        optimizer.step()
    return found


def closure_of(model: Any, rank: int) -> Callable[[], torch.Tensor]:
    """Return what an optimizer's step calls."""

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(*vectors(3, rank))
        loss.backward()
        return loss

    return closure


def _error(act: Act, argument: Any) -> str:
    try:
        return f"gave {act(argument)!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
