"""Linear layers that are trained within a cap, and what is said where they don't fit."""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.config import Config
from zinf_compile.errors import BudgetError
from zinf_compile.ir.compute_shape import tile_range
from zinf_compile.sharded.parameter import unit_of

ALL_AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
WIDTHS = (768, 1500, 1000)


class Stack(nn.Module):
    """Linear layers of these widths, of up to 6 MB each: default tiles cut some of them, at some caps."""

    def __init__(self, *widths: int, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))
        self.tied = tied
        self.width = widths[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer in reversed(self.layers) if self.tied else ():
            x = x @ layer.weight
        return x.square().mean()


def train(model: Stack, options: dict[str, Any], *, steps: int = 2, kind: Any = adamw, evaluated: int = 0) -> list[float]:
    """Accumulate two batches, clip, step; what is held stays within the cap. Return the losses.

    `evaluated`: the rows of a batch that is evaluated behind each backward.
    """
    torch.compiler.reset()
    model.compile(backend=BACKEND, options={"compute": "fx", "compute_shape": {"piece_numel": 1 << 18}, **options})
    optimizer, losses = kind(model.parameters()), []
    for _ in range(steps):
        for _ in range(2):
            loss = model(torch.ones(2, model.width))
            loss.backward()
            losses.append(loss.item())
            if evaluated:
                with torch.no_grad():
                    model(torch.ones(evaluated, model.width))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    zinf_compile.synchronize()
    return losses


def named_by(refusal: str, option: str = "device_memory") -> int:
    found = re.search(
        rf"the smallest{f'(?: {option})?' if option == 'device_memory' else f' {option}'} that works is ([\d,]+)",
        refusal,
        re.IGNORECASE,
    )
    assert found, refusal
    return int(found[1].replace(",", ""))


def refusal_of(model: Stack, options: dict[str, Any], **how: Any) -> str:
    """Return what the error says; nothing where it trains."""
    try:
        train(model, options, **how)
    except BudgetError as error:
        return str(error)
    return ""


def tiles_of(model: nn.Module) -> set[int | None]:
    units = [unit_of(parameter) for parameter in model.parameters()]
    return {unit.placement.tile for unit in units if unit is not None}


def default_tile(cap: int) -> int:
    tile = Config(device_memory=cap).tile_bytes
    assert tile is not None
    return tile


def too_small(options: dict[str, Any], *, widths: tuple[int, ...] = WIDTHS) -> int:
    """Return a cap that is no less than the smallest that works, and would be refused with its own default tiles."""
    least = named_by(refusal_of(Stack(*widths), {**options, "device_memory": 1}))
    for cap in (tile_range(least)[1], least):
        if cap < named_by(refusal_of(Stack(*widths), {**options, "device_memory": 1, "tile": default_tile(cap)})):
            return cap
    raise AssertionError("nothing is tested")


def partitioned(options: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> Stack:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Stack(*WIDTHS).to(dtype)
    made = zinf_compile.partition(model, **options)
    assert isinstance(made, Stack)
    return made


def seeded(kind: Any = Stack, widths: tuple[int, ...] = WIDTHS) -> Any:
    torch.manual_seed(3)
    return kind(*widths)
