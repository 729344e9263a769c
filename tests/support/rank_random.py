"""Train a small model with dropout, and boil everything down to a number: in this process, in another one, on a rank."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import zinf_compile

DROPPED = 0.3


class Block(nn.Module):
    """Two layers with dropout after each: 6 KiB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(torch.tanh(self.up(x)), DROPPED, self.training)
        return x + F.dropout(self.down(hidden), DROPPED, self.training)


class Dropping(nn.Module):
    """Three blocks; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def digest_of_training(*, seed: int, **options: Any) -> str:
    """Take three steps; hash losses and parameters to the last bit."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Dropping()
    x = torch.randn(8, 16)
    compiled = torch.compile(model, backend="zero_infinity", options={"compute": "inductor", "bucket": "8KiB", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    found = hashlib.sha256()
    torch.manual_seed(seed)
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(x)
        loss.backward()
        optimizer.step()
        found.update(loss.detach().numpy().tobytes())
    with zinf_compile.gathered(model):
        for parameter in model.parameters():
            found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def digest_on_a_rank(rank: int, size: int) -> str:
    """Train with the same batches and seed on each rank."""
    return digest_of_training(seed=1, timeout_s=100)


if __name__ == "__main__":
    print(digest_of_training(seed=1))
