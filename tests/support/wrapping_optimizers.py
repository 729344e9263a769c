"""Optimizers that work through others, as scripts and packages have them; PyTorch's hooks know of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer


class Chain(Optimizer):
    """Matrices by one optimizer, vectors by another one; in a list."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        mine = self.param_groups[0]["params"]
        self.parts = [
            AdamW([p for p in mine if p.dim() > 1], 0.01, foreach=False),
            SGD([p for p in mine if p.dim() < 2], 0.1, momentum=0.9),
        ]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step each, the first of them with the closure."""
        losses = [part.step(closure if part is self.parts[0] else None) for part in self.parts]
        return losses[0]


class Lookahead(Optimizer):
    """Slow weights in its own states, towards which another optimizer's steps are drawn."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.base = SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step, and meet the slow weights halfway."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
        loss = self.base.step(closure)
        for p in parameters:
            self.state[p]["slow"].lerp_(p, 0.5)
            p.copy_(self.state[p]["slow"])
        return loss


class Sam(Optimizer):
    """Sharpness-aware minimisation as its best-known implementation does it: two backwards a step, the second in a closure."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Climb, take the gradient there, come back, and step."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        scale = 0.05 / (torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12)
        for p in parameters:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * scale.to(p))
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p in parameters:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()
        return loss


WRAPPERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {"chain": Chain, "lookahead": Lookahead, "sam": Sam}


def train(model: Any, optimizer: Optimizer, loss: Callable[[Any, int], torch.Tensor], steps: int = 3) -> list[float]:
    """Train, the gradient of each step being there before it and computed anew in its closure; return the losses."""
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss(model, number).backward()

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            again = loss(model, number)
            again.backward()
            return again.detach()

        found = optimizer.step(closure)  # type: ignore[arg-type,func-returns-value]
        losses.append(found.item())  # type: ignore[attr-defined]
    return losses
