"""Blocks compiled one by one, on several ranks: what nobody compiled stays whole, its states don't."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import torch
from rank_companions import Stack
from torch import nn
from torch.optim import Optimizer
from training import BACKEND

import zinf_compile
from zinf_compile.state_layout import LAYOUT

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def build(options: dict[str, Any]) -> Stack:
    """Return the model with its blocks compiled one by one; a seed gives all the same."""
    torch.manual_seed(5)
    model = Stack(broken=False)
    for block in model.blocks:
        block.compile(backend=BACKEND, options=options)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return a loss of this rank's own batch."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    out: torch.Tensor = model(torch.randint(11, (4, 3), generator=generator)).square().sum()
    return out


def train(model: Stack, optimizer: Optimizer, rank: int, steps: range, shadow: Optimizer | None = None) -> list[float]:
    """Train; return the norms of the clipped gradients. `shadow` updates copies of what is whole by the same gradients."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        if shadow is not None:
            for copied, parameter in zip(shadow.param_groups[0]["params"], whole_of(model), strict=True):
                copied.grad = None if parameter.grad is None else parameter.grad.clone()
            shadow.step()
        optimizer.step()
    return norms


def train_eager(model: nn.Module, optimizer: Optimizer, world: int, steps: range) -> list[float]:
    """Train the same by eager PyTorch on the mean of all ranks' gradients."""
    norms = []
    for step in steps:
        by_rank = [torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())) for rank in range(world)]
        for parameter, *grads in zip(model.parameters(), *by_rank, strict=True):
            parameter.grad = sum(grads[1:], grads[0].clone()) / world
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms


def whole_of(model: Stack) -> list[nn.Parameter]:
    """Return what no graph uses."""
    return [model.embedding.weight, model.head.weight, model.head.bias]


def states_are_split(rank: int, world: int, name: str, options: dict[str, Any]) -> list[str]:
    """Train beside eager, save and load in both ways, train on; return what was wrong."""
    model, wrong = build(options), []
    eager = copy.deepcopy(model)
    make = OPTIMIZERS[name]
    optimizer, expected = make(model.parameters()), make(eager.parameters())
    unsplit = make([nn.Parameter(p.detach().clone()) for p in whole_of(model)])
    norms = train(model, optimizer, rank, range(2), unsplit), train_eager(eager, expected, world, range(2))
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    for parameter, copied in zip(whole_of(model), unsplit.param_groups[0]["params"], strict=True):
        state = optimizer.state[parameter]
        if not torch.equal(parameter, copied):
            wrong.append(f"bits of {list(parameter.shape)}")
        large = [v.numel() for key, v in state.items() if isinstance(v, torch.Tensor) and v.dim()]
        if not large or {*large} != {-(-parameter.numel() // (64 * world)) * 64} or LAYOUT not in state:
            wrong.append(f"states of {list(parameter.shape)} are {large}")
    own = copy.deepcopy(optimizer.state_dict())
    full = zinf_compile.full_optimizer_state_dict(optimizer)
    weights = zinf_compile.full_state_dict(model)
    if rank == 0:
        assert_same_shapes(expected.state_dict(), full)
        numbers = [0, len(list(model.parameters())) - 2, len(list(model.parameters())) - 1]
        for number, copied in zip(numbers, unsplit.state.values(), strict=True):
            for what, value in copied.items():
                if not torch.equal(full["state"][number][what], value):
                    wrong.append(f"whole state {what} of parameter {number}")
    train(model, optimizer, rank, range(2, 4))
    after = zinf_compile.full_state_dict(model)
    shared: list[Any] = [full]
    torch.distributed.broadcast_object_list(shared)
    ways: dict[str, Callable[[], None]] = {
        "whole, spread": lambda: zinf_compile.load_full_optimizer_state_dict(optimizer, full if rank == 0 else None),
        "its own": lambda: optimizer.load_state_dict(copy.deepcopy(own)),
        "whole, on each rank": lambda: optimizer.load_state_dict(copy.deepcopy(shared[0])),
    }
    for way, load in ways.items():
        zinf_compile.load_full_state_dict(model, weights if rank == 0 else None)
        load()
        train(model, optimizer, rank, range(2, 4))
        again = zinf_compile.full_state_dict(model)
        wrong += [f"{key} after loading {way}" for key, value in again.items() if not torch.equal(value, after[key])]
    return wrong


def assert_same_shapes(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Compare states' names and shapes with eager's."""
    shapes = [
        {key: {n: getattr(v, "shape", v) for n, v in entry.items()} for key, entry in each["state"].items()}
        for each in (expected, found)
    ]
    assert shapes[0] == shapes[1]


def said_at_the_first_step(rank: int, world: int) -> tuple[str, str, str]:
    """Return what is logged of a model most of which is whole, and the error of a step of one rank alone."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log = logging.getLogger("zinf_compile")
    log.addHandler(handler)
    model = build({})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, rank, range(2))
    warned = stream.getvalue()
    stream.truncate(0)
    log.setLevel(logging.INFO)
    small = build({})
    small.embedding.requires_grad_(requires_grad=False)
    other = torch.optim.AdamW(small.parameters(), lr=0.05)
    train(small, other, rank, range(1))
    return (
        warned,
        stream.getvalue(),
        str(sum(v.nbytes for v in optimizer.state[model.embedding.weight].values() if hasattr(v, "dim") and v.dim())),
    )
