"""A model of equal blocks, trained within a cap: what becomes of its saved values, and the bits of keeping them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compute_models import allocated_at_most
from named_cap import named_cap
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.errors import BudgetError
from zinf_compile.plan.profile import Drive, Profile, Rate
from zinf_compile.sharded.parameter import ShardedParameter

ROWS, WIDTH, BLOCKS = 1024, 64, 8
VALUE = ROWS * WIDTH * 4
"""Bytes of one saved value."""
WORDS = {**dict.fromkeys(("params", "grads", "optimizer"), "device"), "bucket": "32MiB"}


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


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor], *, in_flight: bool = False
) -> list[float]:
    """Train for a step, to its end; return the losses of the micro-batches. `in_flight`: all forwards come first."""
    coming = (model(batch) for batch in batches)
    losses = []
    for loss in list(coming) if in_flight else coming:
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    zinf_compile.synchronize()
    return losses


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
        self.losses += take_step(self.model, self.optimizer, self.batches)

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
    """Return the smallest device_memory that a refusal names. One rank asks for the same once: a refusal takes a compilation."""
    asked = repr((sorted(options.items()), sorted(model.items())))
    if dist.is_initialized() or asked not in _least:
        with pytest.raises(BudgetError) as refused:
            Run({**options, "device_memory": 1}, **model).step()
        _least[asked] = named_cap(refused.value)
    return _least[asked]


_least: dict[str, int] = {}
"""Caps that were named so far, by what was asked."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a step that keeps all saved values leads to."""

    losses: list[float]
    values: list[torch.Tensor]


def keep_all(**model: bool) -> Kept:
    """Train for one step without a cap, once for all tests of this process."""
    asked = repr(sorted(model.items()))
    if asked not in _kept:
        run = Run({}, **model)
        run.step()
        _kept[asked] = Kept(run.losses, run.values)
    return _kept[asked]


_kept: dict[str, Kept] = {}


def same(run: Run, other: Run | Kept) -> bool:
    """Return whether both have the same bits."""
    return run.losses == other.losses and all(map(torch.equal, run.values, other.values))


def machine(file: Path, *, drive: float = 1e9, link: float = 0.0) -> Path:
    """Write the profile of a machine whose drive, and `link` to a device with its own memory, move so many bytes per second."""
    rate = Rate(read_bytes_per_second=drive, write_bytes_per_second=drive)
    profile = Profile(
        name="a machine",
        device_memory_bytes=1 << 34,
        flops_per_second={"float32": 2e11},
        reached=1.0,
        device_bytes_per_second=2e10,
        host_is_device=not link,
        to_device_bytes_per_second=link,
        from_device_bytes_per_second=link,
        drive=Drive(rates=(rate,)),
    )
    file.write_text(profile.to_json())
    return file
