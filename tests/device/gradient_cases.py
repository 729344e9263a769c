"""A small model trained with gradients that are accumulated and clipped, on any device, and what the host waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import late
import torch
from torch import nn

import zinf_compile


class Stack(nn.Module):
    """Residual layers, each with two products."""

    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Trained(NamedTuple):
    losses: list[torch.Tensor]
    waits: int
    """Of the last step, by threads that compute, not by lanes."""
    model: nn.Module
    called: Callable[..., torch.Tensor]


def waits_of_compute() -> int:
    """Return how often threads that issue compute waited for the device; drives' lanes and those of changes aside."""
    return sum(count for name, count in late.waits_by_thread().items() if not name.startswith("zinf"))


def train(
    device: str,
    options: dict[str, Any] | None,
    *,
    layers: int = 4,
    micro_batches: int = 3,
    steps: int = 3,
    before_step: Callable[[nn.Module], object] = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    optimizer: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    set_to_none: bool = True,
) -> Trained:
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = Stack(layers).to(device)
    stepper = optimizer(model.parameters())
    called = model if options is None else torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
    generator, losses = torch.Generator().manual_seed(1), []
    batches = [torch.randn(micro_batches, 8, 32, generator=generator).to(device) for _ in range(steps)]
    for batch in batches:
        late.clear()
        for part in batch:
            loss = called(part)
            loss.backward()
            losses.append(loss.detach())
        before_step(model)
        stepper.step()
        stepper.zero_grad(set_to_none)
    waits = waits_of_compute()
    return Trained([loss.cpu() for loss in losses], waits, model, called)
