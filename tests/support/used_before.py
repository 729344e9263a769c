"""A model whose eager code uses each kind of weight before, in the same forward, a graph partitions it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class UsedBefore(nn.Module):
    """Eager code reads a matrix through a view, a kernel, a scale and a frozen matrix; then a graph uses them all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.matrix = nn.Linear(8, 8, bias=False)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.frozen_scale = nn.Parameter(torch.rand(8), requires_grad=False)

    @torch.compiler.disable
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.convolution(self.matrix(x)))) * self.frozen_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.tanh(self.eager(self.first(x))))


def steps(model: nn.Module, call: Any, *, seed: int = 0, count: int = 3) -> list[float]:
    """Train for some steps; return the losses."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(count):
        x = torch.randn(2, 4, 8, generator=generator)
        loss = functional.mse_loss(call(x), x.roll(1, -1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
