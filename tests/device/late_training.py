"""Small models that train on the device and on the CPU alike, with their states in many places."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import late
import torch
from torch import nn

import zinf_compile
from zinf_compile.ir.tiers import TIERS

Options = dict[str, Any]

PLACEMENTS: dict[str, Options] = {
    "device": {},
    "host": {"params": "host", "grads": "host", "optimizer": "host"},
    "host, updated on the device": {"params": "host", "grads": "host", "optimizer": "host", "update": "device"},
    "parameters on the host": {"params": "host"},
    "gradients on the host": {"grads": "host"},
    "states on the host": {"optimizer": "host"},
    "drive": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "drive, updated on the device": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "update": "device"},
    "states on the drive": {"params": "host", "grads": "host", "optimizer": "nvme", "update": "device"},
}
"""Those in which transfers meet each other; all of them are in `EVERY`."""

EVERY: dict[str, Options] = {
    f"{params} {grads} {states}": {"params": params, "grads": grads, "optimizer": states}
    for params, grads, states in itertools.product(TIERS, repeat=3)
}


def on_drives(options: Options, folder: Path) -> Options:
    """Return the options with a folder for drives, where they name one."""
    return {**options, "nvme": str(folder)} if "nvme" in options.values() else options


class Stack(nn.Module):
    """Residual layers, each with two products."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Training:
    """A model on a device, compiled where there are options, and its optimizer."""

    def __init__(self, device: str, options: Options | None, *, layers: int = 4, rank: int = 0) -> None:
        torch.manual_seed(0)
        self.device, self.rank = device, rank
        self.model = Stack(layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        settings = None if options is None else {"compute": "fx", **options}
        self.called = self.model if settings is None else torch.compile(self.model, backend="zero_infinity", options=settings)

    def batches(self, step: int, micro_batches: int) -> torch.Tensor:
        """Return those of a step, on the device."""
        generator = torch.Generator().manual_seed(1 + step + 1000 * self.rank)
        return torch.randn(micro_batches, 8, 32, generator=generator).to(self.device)

    def step(self, batches: torch.Tensor, *, clipped: bool = True) -> list[torch.Tensor]:
        """Take a step of some micro-batches; return the losses, which nobody has waited for."""
        losses = []
        for part in batches:
            loss = self.called(part)
            loss.backward()
            losses.append(loss.detach())
        if clipped:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1e9, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def train(
    device: str, options: Options | None, *, layers: int = 4, micro_batches: int = 2, clipped: bool = True, rank: int = 0
) -> tuple[list[torch.Tensor], list[Counter[str]]]:
    """Return the losses of three steps, what each of them counted, and what was counted afterwards, when all is over."""
    torch.compiler.reset()
    zinf_compile.reset()
    training = Training(device, options, layers=layers, rank=rank)
    losses: list[torch.Tensor] = []
    counts: list[Counter[str]] = []
    batches = [training.batches(step, micro_batches) for step in range(3)]
    late.clear()
    for batch in batches:
        losses += training.step(batch, clipped=clipped)
        counts.append(late.counters())
        late.clear()
    losses = [loss.cpu() for loss in losses]
    torch.accelerator.synchronize()
    return losses, [*counts, late.counters()]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Say whether these are equal to the bit."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
