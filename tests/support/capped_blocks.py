"""A model of equal blocks, trained within a cap: what becomes of its saved values, and the bits of keeping them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compute_models import allocated_at_most
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.sharded.parameter import ShardedParameter

ROWS, WIDTH, BLOCKS = 1024, 64, 8
VALUE = ROWS * WIDTH * 4
"""Bytes of one saved value."""
WORDS = dict.fromkeys(("params", "grads", "optimizer"), "device")


class Block(nn.Module):
    """Saves what is as wide as several of its input; the products of `heavy` ones take long."""

    def __init__(self, *, heavy: bool) -> None:
        super().__init__()
        inner = 4 * WIDTH
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.heavy = heavy
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        if self.heavy:
            scores = y @ y.mT  # rows by rows
            y = scores @ y / 1e6
        return x + self.drop(self.down(nn.functional.gelu(y)))


class Model(nn.Module):
    def __init__(self, *, heavy: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(heavy=heavy) for _ in range(BLOCKS)))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[: BLOCKS // 2](x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.blocks[BLOCKS // 2 :](x).square().mean()


class Run:
    """A model, trained for some steps of two micro-batches of so many rows."""

    def __init__(self, options: dict[str, Any], *, rows: int = ROWS, **model: bool) -> None:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        self.model = Model(**model)
        self.optimizer = adamw(self.model.parameters())
        self.model.compile(backend=BACKEND, options={"compute": "fx", **options})
        self.batches = [torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(2)]
        self.losses: list[float] = []
        self.values: list[torch.Tensor] = []
        """Of the parameters and the random generator, after the last step."""

    def train(self) -> None:
        for batch in self.batches:
            loss = self.model(batch)
            loss.backward()
            self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        zinf_compile.synchronize()

    def step(self) -> None:
        """Train for one step, and note the values that it leads to."""
        self.train()
        self.values = [*zinf_compile.full_state_dict(self.model).values(), torch.get_rng_state()]

    @property
    def decided(self) -> dict[str, int]:
        """Bytes of saved values by what becomes of them."""
        found = zinf_compile.stats(self.model)["activations"]
        return {word: found.get(word, 0) for word in ("keep", "recompute", "nvme")}

    def held_at_most(self) -> int:
        """Return the most bytes that PyTorch's allocator and the runtime hold in a step, with the input of a call."""
        parameter: Any = next(p for p in self.model.parameters() if isinstance(p, ShardedParameter))
        return int(parameter._zinf_unit.context.memory.ledger.total()[0] + VALUE + allocated_at_most(self.train))


def least(options: dict[str, Any], **model: Any) -> int:
    """Return the smallest device_memory that a refusal names."""
    with pytest.raises(BudgetError) as refused:
        Run({**options, "device_memory": 1}, **model).step()
    found = re.search(r"smallest (?:device_memory )?that works is ([\d,]+)", str(refused.value))
    assert found is not None, str(refused.value)
    return int(found[1].replace(",", ""))


def same(run: Run, other: Run) -> bool:
    """Return whether both have the same bits."""
    return run.losses == other.losses and all(map(torch.equal, run.values, other.values))
