"""A small model of many kinds of parameters and two optimizers, in the middle of training, with states on any tier."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from training import BACKEND

import zinf_compile

AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": dict.fromkeys(("params", "grads", "optimizer"), "host"),
    "states": {"optimizer": "nvme"},
    "states and master copies": {"optimizer": "nvme", "master": "float32"},
    "parameters": {"params": "nvme"},
    "nvme": AWAY,
    "in tiles": {**AWAY, "tile": 256},
    "nvme and master copies": {**AWAY, "master": "float32"},
}


class Small(nn.Module):
    """A tied weight, a frozen one, a number, one that no graph uses, and one whose dimensions lie in another order in memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words, self.down = nn.Embedding(23, 40, dtype=dtype), nn.Linear(40, 13, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(13, 3, dtype=dtype), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(40, 13, dtype=dtype).t())
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        y = torch.tanh(self.down(x) + x @ self.turned.t()) @ self.frozen * self.scale
        self.mean.add_(y.detach().float().mean((0, 1)))
        return (x @ self.words.weight.t()).float().square().mean() + y.float().square().mean()


class Training:
    """A model and two optimizers, after two steps."""

    def __init__(self, place: str, drive: Path) -> None:
        torch.manual_seed(0)
        options = {**PLACES[place], "compute_shape": {"piece_numel": 96}}
        options |= {"nvme": str(drive)} if "nvme" in options.values() else {}
        self.model = Small(torch.bfloat16 if "master" in options else torch.float32)
        self.compiled = torch.compile(self.model, backend=BACKEND, options=options)
        self.optimizers = [
            torch.optim.AdamW([self.model.words.weight, self.model.turned, self.model.scale], lr=0.01, fused=True),
            torch.optim.Adam([*self.model.down.parameters(), self.model.unused], lr=0.01, fused=True, amsgrad=True),
        ]
        for _ in range(2):
            self.step()

    def step(self) -> None:
        for _ in range(2):
            self.compiled(torch.randint(23, (4, 6))).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def whole(self) -> Any:
        states = [zinf_compile.full_optimizer_state_dict(each) for each in self.optimizers]
        return copy.deepcopy([zinf_compile.full_state_dict(self.model), states])
