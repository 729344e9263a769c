"""Training on one of several ranks: with the optimizer states in memory, on a drive, and with everything on a drive."""

from __future__ import annotations

from typing import Any

import torch
from models import CASES
from tiers import in_pieces
from torch import nn
from training import BACKEND, adamw, plain_step

import zinf_compile
from zinf_compile.optim.state_layout import without_note


def places(folder: str) -> list[dict[str, Any]]:
    """Return the options with which states are in memory, on a drive, and everything is there."""
    everything = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
    return [{}, {"optimizer": "nvme", "nvme": folder}, {**everything, "nvme": folder}]


def train_on_ranks(rank: int, size: int, folder: str) -> list[Any]:
    """Return losses, parameters and this rank's states for each."""
    results = []
    for options in places(folder):
        torch.manual_seed(7)
        losses: list[float] = []
        whole: list[Any] = []
        states: list[Any] = []
        for name in ("tied", "odd_shapes"):
            model = CASES[name].build()
            model.compile(backend=BACKEND, options={**options, **in_pieces(128)})
            optimizer = adamw(model.parameters())
            for step in range(4):
                losses.append(plain_step(model, optimizer, CASES[name].batch(step, rank)).item())
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            whole.append([value.tolist() for value in zinf_compile.full_state_dict(model).values()])
            kept = optimizer.state_dict()["state"]
            states.append({(n, name): v.tolist() for n, state in kept.items() for name, v in without_note(state).items()})
        results.append((losses, whole, states))
    return results


def switch_momentum_on(rank: int, size: int, folder: str) -> list[Any]:
    """Return losses and parameters of training whose momentum begins late, for each place of the states."""
    results = []
    for options in places(folder):
        torch.manual_seed(7)
        model = CASES["tied"].build()
        model.compile(backend=BACKEND, options={**options, **in_pieces(128)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(5):
            optimizer.param_groups[0]["momentum"] = 0.9 * (step > 1)
            losses.append(plain_step(model, optimizer, CASES["tied"].batch(step, rank)).item())
        results.append((losses, [value.tolist() for value in zinf_compile.full_state_dict(model).values()]))
    return results
