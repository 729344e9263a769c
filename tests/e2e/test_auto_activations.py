"""`activations="auto"`: as many saved values leave as a declared `device_memory` has no room for; the bits of keeping them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compute_models import allocated_at_most
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

ROWS, WIDTH = 2048, 128
VALUE = ROWS * WIDTH * 4
"""Bytes of one saved value."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(torch.sin(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Run:
    """A model of one's own, trained for some steps of two micro-batches."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = adamw(self.model.parameters())
        self.model.compile(backend=BACKEND, options={"compute": "fx", **options})
        self.losses: list[float] = []

    def step(self, *, in_flight: bool = False) -> None:
        batches = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(2)]
        if in_flight:
            losses = [self.model(batch) for batch in batches]
            torch.stack(losses).sum().backward()
        else:
            losses = [self.model(batch) for batch in batches]
            for loss in losses:
                loss.backward()
        self.losses += [loss.item() for loss in losses]
        self.optimizer.step()
        self.optimizer.zero_grad()
        zinf_compile.synchronize()
