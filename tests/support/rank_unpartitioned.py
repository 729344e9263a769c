"""Models of which Dynamo sees only a part, on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from training import BACKEND

from zinf_compile.errors import RankMismatchError
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter


class Block(nn.Module):
    """One layer; not a module of torch's own, which Dynamo wouldn't compile by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """An embedding, blocks and a head; the blocks can be compiled alone, or break their graph."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(7, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            if self.broken:
                torch._dynamo.graph_break()
        out: torch.Tensor = self.head(x)
        return out


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    out: torch.Tensor = model(torch.randint(11, (4, 3), generator=generator)).square().sum()
    return out


def train(rank: int, world_size: int, way: str) -> list[str]:
    """Train three accumulated steps beside eager; return what differed, empty when nothing did."""
    torch.manual_seed(5)
    model = Stack(broken=way == "broken")
    eager = copy.deepcopy(model)
    if way == "regional":
        for block in model.blocks:
            block.compile(backend=BACKEND)
    else:
        model.compile(backend=BACKEND)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
    wrong = []
    for step in range(3):
        for micro in range(2):
            _loss(model, rank, 2 * step + micro).backward()
            by_rank = []
            for other in range(world_size):
                grads = torch.autograd.grad(_loss(eager, other, 2 * step + micro), list(eager.parameters()))
                by_rank.append(grads)
            for parameter, *grads in zip(eager.parameters(), *by_rank, strict=True):
                total = grads[0].clone()
                for grad in grads[1:]:
                    total += grad
                total /= world_size
                parameter.grad = total if parameter.grad is None else parameter.grad + total
        for (name, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
            grad = found.grad.full_tensor() if isinstance(found.grad, ShardedGradient) else found.grad
            if grad is None or not torch.equal(grad, expected.grad):  # type: ignore[arg-type]
                wrong.append(f"{name} at step {step}")
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 100.0) for m in (model, eager)]
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    partitioned = [name for name, p in model.named_parameters() if isinstance(p, ShardedParameter)]
    return wrong if any("blocks" in name for name in partitioned) else ["nothing was partitioned"]


def other_seeds(rank: int, world_size: int) -> str:
    """Build the model from another seed on each rank; return the error of the first backward."""
    torch.manual_seed(rank)
    model = Stack(broken=False)
    for block in model.blocks:
        block.compile(backend=BACKEND)
    try:
        _loss(model, rank, 0).backward()
    except RankMismatchError as error:
        return str(error)
    return "no error"
