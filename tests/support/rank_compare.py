"""Training on real ranks beside eager PyTorch: one eager copy of the model for each rank, fed with that rank's data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.sharded.gradient import ShardedGradient

Loss = Callable[[Any, int, int], torch.Tensor]
"""`loss(model, rank, step)`; the random state is seeded by rank and step before it is called."""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Where a case runs, and the options it compiles with."""

    rank: int
    size: int
    options: dict[str, Any]

    def compile(self, model: Any) -> Any:
        """Wrap a model or function with the backend."""
        return torch.compile(model, backend=BACKEND, options=self.options)


@dataclasses.dataclass
class Expected:
    """A gradient in eager PyTorch: the mean over the ranks, and the sum of magnitudes that bounds its rounding."""

    mean: torch.Tensor
    magnitude: torch.Tensor
    bitwise: bool


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make an SGD with momentum; on pieces it has eager's bits."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make an AdamW; on pieces it has eager's bits (with `fused=True` it wouldn't: see `fused_adamw`)."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)


def compare_training(
    ranks: Ranks,
    build: Callable[[], nn.Module],
    loss: Loss,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    prepare: Callable[[Ranks, nn.Module], Any] = Ranks.compile,
    steps: int = 3,
    micro_steps: int = 1,
    whole: Collection[str] = (),
    as_aot_eager: bool = False,
) -> Any:
    """Train compiled and, beside it, in eager; compare losses, gradients, updated parameters and buffers.

    After the comparison of gradients the eager copies step on the compiled model's, so that both optimizers see the same.
    Returns the partitioned model. `whole` names the parameters that no compiled graph uses: those stay whole on every rank.
    `as_aot_eager`: the copies run through PyTorch's own `aot_eager`, which adds up gradients in another order than eager does.
    """
    torch.manual_seed(7)
    model = build()
    eager = [copy.deepcopy(model) for _ in range(ranks.size)]
    references: list[Any] = [torch.compile(m, backend="aot_eager") for m in eager] if as_aot_eager else list(eager)
    called = prepare(ranks, model)
    optimizers = [optimizer(m) for m in (model, *eager)]
    for step in range(steps):
        expected: dict[str, Expected] = {}
        for batch in range(step * micro_steps, (step + 1) * micro_steps):
            values = [backward(loss, m, rank, batch) for rank, m in enumerate(references)]
            value = backward(loss, called, ranks.rank, batch)
            assert_equal(value, values[ranks.rank], f"loss of step {step}")
            add_gradients(expected, eager)
        compare_gradients(model, expected, f"step {step}")
        sharded = {name for name, p in model.named_parameters() if isinstance(p.grad, ShardedGradient)}
        assert sharded == expected.keys() - set(whole)
        take_gradients(model, eager)
        for o in optimizers:
            o.step()
            o.zero_grad()
        compare_values(model, eager[ranks.rank], f"after step {step}")
    return model


def backward(loss: Loss, model: Any, rank: int, step: int) -> torch.Tensor:
    """Run forward and backward of one rank's step; return the loss."""
    torch.manual_seed(1000 * step + rank)
    value = loss(model, rank, step)
    value.backward()
    return value.detach()


def add_gradients(expected: dict[str, Expected], eager: list[nn.Module]) -> None:
    """Add the mean of the copies' gradients, summed in rank order and then divided; take the gradients away."""
    by_rank = [dict(m.named_parameters()) for m in eager]
    for name in by_rank[0]:
        grads = [parameters[name].grad for parameters in by_rank]
        if grads[0] is None:
            continue
        total, magnitude = grads[0].clone(), grads[0].abs()
        for grad in grads[1:]:
            assert grad is not None
            total += grad
            magnitude += grad.abs()
        mean = total / len(eager)
        if name in expected:
            expected[name].mean += mean
            expected[name].magnitude += magnitude
        else:
            expected[name] = Expected(mean, magnitude, bitwise=len(eager) <= 2)
    for m in eager:
        m.zero_grad()


def compare_gradients(model: nn.Module, expected: dict[str, Expected], when: str) -> None:
    """Two ranks: bitwise. More: within 4 eps of the summed magnitudes, element by element."""
    for name, p in model.named_parameters():
        if name not in expected:
            assert p.grad is None, f"{when}: {name} has a gradient, in eager it has none"
            continue
        assert p.grad is not None, f"{when}: {name} has no gradient, in eager it has one"
        wanted = expected[name]
        found = p.grad.full_tensor() if isinstance(p.grad, ShardedGradient) else p.grad
        if wanted.bitwise:
            assert_equal(found, wanted.mean, f"{when}: gradient of {name}")
            continue
        too_much = (found - wanted.mean).abs() - 4 * torch.finfo(found.dtype).eps * wanted.magnitude
        assert (too_much <= 0).all(), f"{when}: gradient of {name} is off by {too_much.max().item()} more than allowed"


def take_gradients(model: nn.Module, eager: list[nn.Module]) -> None:
    """Give the eager copies the compiled model's gradients, whole."""
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, ShardedGradient) else p.grad
        for m in eager:
            m.get_parameter(name).grad = None if grad is None else grad.clone()


def compare_values(model: nn.Module, eager: nn.Module, when: str) -> None:
    """Compare parameters and buffers, bitwise."""
    with zinf_compile.gathered(model):
        for name, p in model.named_parameters():
            assert_equal(p.detach(), eager.get_parameter(name).detach(), f"{when}: parameter {name}")
    for name, buffer in model.named_buffers():
        assert_equal(buffer, eager.get_buffer(name), f"{when}: buffer {name}")


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Require the same shape, type and bits."""
    assert found.shape == wanted.shape, f"{what}: shape {list(found.shape)}, wanted {list(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, wanted {wanted.dtype}"
    different = found != wanted
    assert not different.any(), (
        f"{what}: {int(different.sum())} of {found.numel()} elements differ, by {(found - wanted).abs().max().item()} at most"
    )
