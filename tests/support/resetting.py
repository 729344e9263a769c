"""What a process has, and training that takes all of it: for what `zinf_compile.reset()` lets go of."""

from __future__ import annotations

import os
import threading
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import StoreWarning


class Tied(nn.Module):
    """A table that is its own head, and a layer with a bias of odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 7)
        self.inner = nn.Linear(7, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.inner(self.table(words))))
        return logits


def placed(tier: str, folder: str) -> dict[str, Any]:
    """Return options that keep all states on a tier."""
    options: dict[str, Any] = {"compute": "fx", "params": tier, "grads": tier, "optimizer": tier}
    return {**options, "nvme": folder} if tier == "nvme" else options


def train(options: dict[str, Any], *, steps: int = 3) -> tuple[nn.Module, Optimizer, list[float]]:
    """Train a new model; return it, its optimizer and the losses."""
    torch.manual_seed(0)
    model = Tied()
    model.compile(backend="zero_infinity", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)  # of a /tmp in memory
        for step in range(steps):
            optimizer.zero_grad()
            words = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(step))
            loss = model(words).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, optimizer, losses


def possessions() -> tuple[int, int, int]:
    """Return how many threads, threads of ours and open files this process has, as the kernel and the interpreter count them."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("zinf")]
    return len(os.listdir("/proc/self/task")), len(ours), len(os.listdir("/proc/self/fd"))


def assert_nothing_more_than(before: tuple[int, int, int]) -> None:
    """Fail where a process has more than before. Threads that were told to end get 10 s for it."""

    def more() -> bool:
        return any(now > then for now, then in zip(possessions(), before, strict=True))

    deadline = time.monotonic() + 10
    while more() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not more(), f"threads, threads of ours, files: {before} before, {possessions()} now"
