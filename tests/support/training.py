"""Train a model eager and compiled, side by side, and compare them bit by bit after each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from models import Case, loss_of
from places import place
from torch import fx, nn
from torch._dynamo import register_backend
from torch.optim import Optimizer

from zinf_compile.backend.entry import compile_captured
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter

BACKEND = "zero_infinity_fx"


@register_backend(name=BACKEND)
def zero_infinity_fx(gm: fx.GraphModule, inputs: Sequence[Any], *, options: Any = None, mode: str | None = None) -> Any:
    """The backend with `compute="fx"` where a test doesn't say otherwise: eager PyTorch's own kernels, to be compared bitwise.

    It partitions parameters also where nothing would move, so that most tests need no options for that.
    """
    given = {"compute": "fx", **(options or {})} if isinstance(options, dict | None) else options
    return compile_captured(gm, inputs, options=given, mode=mode, partition=True)


MOST_VARIANTS = 2
"""Dynamo compiles a graph for whole parameters and again for hollow ones; never for each model or block."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Step = Callable[[Any, Optimizer, tuple[Any, ...]], torch.Tensor]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make the optimizer that tests use where the optimizer isn't what they are about."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True)


def plain_step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
    """Take one step of the ordinary loop; gradients stay until the next."""
    optimizer.zero_grad()
    loss = loss_of(model(*batch))
    loss.backward()
    optimizer.step()
    return loss


def accumulating_step(model: nn.Module, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
    """Take one step of two micro-batches, with clipping."""
    optimizer.zero_grad()
    for _ in range(2):
        loss = loss_of(model(*batch)) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss


def in_place(model: nn.Module) -> nn.Module:
    """Compile with `model.compile`."""
    model.compile(backend=BACKEND)
    return model


def wrapped(model: nn.Module) -> Any:
    """Compile with `torch.compile`."""
    return torch.compile(model, backend=BACKEND)


def twins(build: Callable[[], nn.Module], *, seed: int = 7) -> tuple[nn.Module, nn.Module]:
    """Return two equal models, on the place for them."""
    torch.manual_seed(seed)
    model = build().to(place())
    return model, copy.deepcopy(model)


def train_both(
    case: Case,
    *,
    optimizer: MakeOptimizer = adamw,
    step: Step = plain_step,
    compiled: Callable[[nn.Module], Any] = in_place,
    reference: Callable[[nn.Module], Any] = lambda model: model,
    steps: int = 3,
    whole: Collection[str] = (),
) -> tuple[nn.Module, nn.Module]:
    """Train eager and compiled twins alike and compare them after each step; return both models.

    `reference` makes the eager side, `compiled` the other, from equal modules. All parameters but `whole` must have become
    partitioned.
    """
    eager, ours = twins(case.build)
    sides = [(run(model), optimizer(model.parameters())) for run, model in ((reference, eager), (compiled, ours))]
    for number in range(steps):
        train_step_on(sides, [eager, ours], step, case.batch(number, 0), number)
    assert {name for name, p in ours.named_parameters() if not isinstance(p, ShardedParameter)} == set(whole)
    return eager, ours


def train_step_on(
    sides: Sequence[tuple[Any, Optimizer]], models: Sequence[nn.Module], step: Step, batch: tuple[Any, ...], number: int
) -> None:
    """Take one step on both sides from the same random state, and compare."""
    results = []
    for model, optimizer in sides:
        torch.manual_seed(number)
        loss = step(model, optimizer, batch)
        results.append((loss.detach().clone(), torch.get_rng_state()))
    (loss, random), (our_loss, our_random) = results
    assert_same(f"loss of step {number}", loss, our_loss)
    assert torch.equal(random, our_random), f"step {number} drew other random numbers"
    assert_same_models(*models, where=f"after step {number}")


def assert_same_models(eager: nn.Module, ours: nn.Module, *, where: str = "") -> None:
    """Compare parameters, gradients and buffers by name, bit by bit."""
    theirs = dict(ours.named_parameters())
    for name, parameter in eager.named_parameters():
        assert_same(f"{name} {where}", parameter.detach(), theirs[name].detach())
        assert_same(f"gradient of {name} {where}", parameter.grad, whole_gradient(theirs[name]))
    buffers = dict(ours.named_buffers())
    for name, buffer in eager.named_buffers():
        assert_same(f"{name} {where}", buffer, buffers[name])


def assert_same(what: str, expected: torch.Tensor | None, found: torch.Tensor | None) -> None:
    """Compare two tensors bit by bit, or require both to be None."""
    if expected is None or found is None:
        assert expected is found, f"{what}: expected {expected}, found {found}"
        return
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), f"{what}: {found.shape} {found.dtype}"
    assert torch.equal(_bits(found), _bits(expected)), f"{what} differs by up to {_distance(expected, found)}"


def whole_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the whole gradient of a parameter, partitioned or not."""
    grad = parameter.grad
    return grad.full_tensor() if isinstance(grad, ShardedGradient) else grad


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected.cpu().double() - found.cpu().double()).abs().max())
