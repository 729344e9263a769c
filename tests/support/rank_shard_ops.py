"""What ranks do in test_shard_ops_on_ranks.py."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from models import CASES, vectors
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import BACKEND, assert_same

import zinf_compile
from zinf_compile.sharded.tensor import ShardedTensor


class Beside:
    """A partitioned model, and an eager one that has the mean of all ranks' gradients."""

    def __init__(self, rank: int, size: int, tiers: tuple[str, str, str], folder: str, build: Callable[[], nn.Module]) -> None:
        self.rank, self.size = rank, size
        torch.manual_seed(3)
        self.eager = build()
        torch.manual_seed(3 + rank)
        self.model = build()  # all have rank 0's values from the first call on
        self.before = [p.detach().clone() for p in self.model.parameters()]
        options: dict[str, Any] = {**dict(zip(("params", "grads", "optimizer"), tiers, strict=True)), "timeout_s": 60}
        if "nvme" in tiers:
            options["nvme"] = os.path.join(folder, str(rank))
            os.makedirs(options["nvme"], exist_ok=True)
        self.options = options
        self.model.compile(backend=BACKEND, options=options)

    def backward(self, step: int) -> None:
        """Make gradients: eager ones summed in rank order, then divided."""
        self.model(*vectors(step, self.rank)).backward()
        parameters = list(self.eager.parameters())
        by_rank = [torch.autograd.grad(self.eager(*vectors(step, rank)), parameters) for rank in range(self.size)]
        for parameter, *grads in zip(parameters, *by_rank, strict=True):
            total = grads[0].clone()
            for grad in grads[1:]:
                total += grad
            parameter.grad = total / self.size

    def both(self, act: Callable[[nn.Module, Any], Any], beside: tuple[Any, Any] = (None, None)) -> None:
        """Do it with both, then compare all parameters."""
        act(self.eager, beside[0])
        act(self.model, beside[1])
        state = zinf_compile.full_state_dict(self.model)
        for name, value in self.eager.state_dict().items() if self.rank == 0 else ():
            assert_same(name, value, state[name])


@torch.no_grad()
def descend(model: nn.Module, _: Any = None) -> None:
    """Update by hand; in products and sums alone, whose rounding doesn't depend on where an element lies."""
    for p in model.parameters():
        assert p.grad is not None
        p.sub_(p.grad * 0.1)
        p.grad.mul_(0.5)
        p.data.sub_(p.grad)
    torch._foreach_mul_(list(model.parameters()), 0.5)
    model.zero_grad()


@torch.no_grad()
def average(model: nn.Module, averages: list[torch.Tensor]) -> None:
    """Let averages follow."""
    for mine, p in zip(averages, model.parameters(), strict=True):
        mine.mul_(0.5).add_(p * 0.5)


@torch.no_grad()
def swap_and_swap_back(model: nn.Module, shadow: list[torch.Tensor]) -> None:
    """Give parameters other values for a while, as evaluation with averages does."""
    backup = [p.data for p in model.parameters()]
    for p, value in zip(model.parameters(), shadow, strict=True):
        p.data = value
    model(*vectors(0))
    for p, value in zip(model.parameters(), backup, strict=True):
        p.data = value
    for p in model.parameters():
        p.data = p.data * 2


@torch.no_grad()
def assign_data(model: nn.Module, averages: list[torch.Tensor]) -> None:
    """Assign to the data of gradients and of averages, as loops by hand do."""
    for average, p in zip(averages, model.parameters(), strict=True):
        assert p.grad is not None
        taken = p.grad.data
        p.grad.data = p.grad.data / 2
        p.grad.add_(taken)
        average.data = average.data * 0.5 + p * 0.5
    descend(model)


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return what is partitioned whole."""
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def train(rank: int, size: int, folder: str, tiers: tuple[str, str, str], name: str) -> None:
    """Train by hand, with averages, penalties and a twin, beside eager."""
    pair = Beside(rank, size, tiers, folder, CASES[name].build)
    eager, model = pair.eager, pair.model
    early = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (eager, model)]
    copies = [p.detach().clone() for p in eager.parameters()]
    pair.backward(0)
    pair.both(descend)
    pair.both(average, (copies, pair.before))  # those of other ranks than 0 were other ones: rank 0's count
    for one, other in zip(copies, pair.before, strict=True):
        assert type(other) is ShardedTensor
        assert_same("made before", one, whole(other))
    averages = [[p.detach().clone() for p in m.parameters()] for m in (eager, model)]
    averaged = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (eager, model)]
    for step in (1, 2):
        pair.backward(step)
        pair.both(descend)
        pair.both(average, (averages[0], averages[1]))
        for m, *found in zip((eager, model), averaged, early, strict=True):
            for a in found:
                a.update_parameters(m)
    pair.backward(3)
    pair.both(assign_data, (averages[0], averages[1]))
    for one, other in zip(*averages, strict=True):
        assert_same("average", one, whole(other))
    pair.both(swap_and_swap_back, (averages[0], averages[1]))
    for one, other in zip(*[a.parameters() for a in early], strict=True):
        assert type(other) is nn.Parameter, "a module made before stays whole"
        assert_same("made before, whole", one.detach(), other.detach())
    state = zinf_compile.full_state_dict(averaged[1])
    for key, value in averaged[0].state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(state[key], value)  # lerp rounds otherwise where vectors end
    reduce(eager, model)
    penalise(pair)
    twin = copy.deepcopy(model)
    twin.compile(backend=BACKEND, options=pair.options)
    with torch.no_grad():
        assert_same("twin", eager(*vectors(5, rank)), twin(*vectors(5, rank)))


@torch.no_grad()
def reduce(eager: nn.Module, model: nn.Module) -> None:
    """Compare reductions over all elements; the padding of shards holds what it may."""
    pairs = list(zip(eager.parameters(), model.parameters(), strict=True))
    for p, q in pairs:
        torch.testing.assert_close((q * q + 1).sum(), (p * p + 1).sum())
        torch.testing.assert_close(q.norm(), p.norm())
        assert torch.equal(q, q.clone())
        if p.numel():
            assert_same("extreme", (p + 1).amin(), (q + 1).amin())
            torch.testing.assert_close(q.exp().mean(), p.exp().mean())
        if p.is_contiguous():
            torch.testing.assert_close(torch.dot(q.flatten(), q.flatten()), torch.dot(p.flatten(), p.flatten()))
    norms = [torch.stack(torch._foreach_norm(list(m.parameters()))) for m in (eager, model)]
    torch.testing.assert_close(norms[1], norms[0])


def penalise(pair: Beside) -> None:
    """Differentiate a penalty that each rank weighs otherwise: gradients are the mean of what the ranks' losses have."""
    pair.backward(4)
    for p in pair.eager.parameters():
        assert p.grad is not None
        p.grad += 2 * p.detach() * (pair.size + 1) / 2
    penalty = sum(q.pow(2).sum() for q in pair.model.parameters())
    assert isinstance(penalty, torch.Tensor)
    (penalty * (pair.rank + 1)).backward()
    for p, q in zip(pair.eager.parameters(), pair.model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)  # type: ignore[union-attr]
    for m in (pair.eager, pair.model):
        m.zero_grad()


def alone(rank: int, size: int, folder: str) -> dict[str, str]:
    """What one rank does without the others is an error on all of them, or its own affair."""
    found: dict[str, str] = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            found[name] = f"gave {act()!r}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    pair = Beside(rank, size, ("device",) * 3, folder, CASES["mlp"].build)
    model, weight = pair.model, pair.model.get_parameter("first.weight")
    with torch.no_grad():
        model(*vectors(0))
        copied = weight.clone() + weight.detach() * 2 if rank == 0 else None  # local: nobody need know
        attempt("alone", weight.norm if rank == 0 else lambda: model(*vectors(0)))
        attempt("another", (weight if rank == 0 else model.get_parameter("second.weight")).sum)
        attempt("whole", lambda: weight + torch.full((13, 7), float(rank)))
        attempt("equal", lambda: (weight - weight.new_ones(13, 7)).amax() + (weight - torch.ones(13, 7)).amin())
        model(*vectors(0))
        if rank == 0:
            weight.mul_(0.5)
        attempt("changed", lambda: model(*vectors(0)))
        zinf_compile.load_full_state_dict(model, pair.eager.state_dict())
        attempt("loaded", lambda: model(*vectors(0)))
    del copied
    return found
