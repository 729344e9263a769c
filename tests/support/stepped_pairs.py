"""Pairs of an eager model and its twin with all states off the device, for what happens outside of the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import Mlp, vectors
from tiers import compiled, options_for
from torch import nn
from twin_models import Twins


class Pair(Twins):
    """An eager model and its twin with all states off the device, one step into their training."""

    def __init__(
        self,
        folder: Path,
        *,
        tier: str = "nvme",
        build: Callable[[], nn.Module] = Mlp,
        train: bool = True,
        piece: int | None = None,
    ) -> None:
        super().__init__(build, lambda model: compiled(model, options_for((tier, tier, tier), folder, piece=piece)))
        if train:
            self.each(step)

    def companions(self, make: Callable[[nn.Module], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Make tensors beside both."""
        return [make(model) for model in self.models]


def step(model: Any, optimizer: Any) -> torch.Tensor:
    """Take a step, most of which is still to be done when this returns."""
    loss = model(*vectors(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


def clones(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of all parameters, as an average begins with."""
    return [p.detach().clone() for p in model.parameters()]
