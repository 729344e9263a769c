"""Layers of one class behind graph breaks: their graphs name parameters alike, and which comes first follows from the data."""

from __future__ import annotations

import torch
from torch import nn
from training import adamw


class Expert(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 31), nn.Linear(31, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.silu(self.a(x)))


class Experts(nn.Module):
    """Each gets the rows that a router gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).squeeze(-1)  # breaks the graph
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows][:, None])
        return out.square().mean()


def train_experts(rank: int, size: int, folder: str, planner: str | None) -> list[float]:
    """Train with states on a drive, and homes of parameters as they are chosen; return the losses."""
    torch.manual_seed(0)
    model = Experts()
    options = {"compute": "fx", "nvme": folder, "optimizer": "nvme", "planner": planner, "timeout_s": 60}
    call, optimizer = torch.compile(model, backend="zero_infinity", options=options), adamw(model.parameters())
    losses = []
    for step in range(2):
        for micro in range(3):
            numbers = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
            loss = call(torch.randn(12, 8, generator=numbers))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
