"""A model and its eager twin, whose optimizers' states are read and changed alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tiers import Placement, compiled, options_for, sundry, train_step
from torch.optim import Optimizer
from twin_models import Twins

ALL_ON_NVME: Placement = ("nvme", "nvme", "nvme")
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
Act = Callable[[Optimizer, list[torch.Tensor]], Any]


class Pair(Twins):
    """A model beside its eager twin."""

    def __init__(self, placement: Placement, folder: Path, make: Callable[..., Optimizer], **options: Any) -> None:
        dtype = options.pop("dtype", torch.float32)
        super().__init__(
            lambda: sundry(dtype), lambda model: compiled(model, options_for(placement, folder, piece=128, **options)), make
        )
        self.other, self.optimizer = self.optimizers
        self.steps = 0

    def train(self, steps: int = 1) -> None:
        """Take steps with both and compare the losses."""
        for _ in range(steps):
            theirs, mine = [train_step(model, optimizer, self.steps) for model, optimizer in self.sides]
            assert mine == theirs
            self.steps += 1

    def act(self, act: Act) -> list[Any]:
        """Do the same to both."""
        return [act(optimizer, [p for p in model.parameters() if p.requires_grad]) for model, optimizer in self.sides]
