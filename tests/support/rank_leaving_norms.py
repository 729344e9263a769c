"""Clip gradients that live off the device, on several ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from training import adamw

import zinf_compile
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.memory.leaving_norms import LeavingNorms
from zinf_compile.runtime.units.offloaded_gradient import OffloadedGradient

STEPS = 3


def clipped(rank: int, size: int, options: dict[str, Any], apart: bool) -> tuple[list[float], int, int]:
    """Train with clipping; return losses, norms and sums of values, and how many norms were known and not known.

    Raises where that leads to other bits than norms that are read back.
    """
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        found, known, read = _train(rank, options)
        wanted = LeavingNorms.are_wanted
        LeavingNorms.are_wanted = False  # type: ignore[assignment,method-assign]
        try:
            again, none, _ = _train(rank, options)
        finally:
            LeavingNorms.are_wanted = wanted  # type: ignore[method-assign]
    assert found == again
    assert none == 0
    return found, known, read


def _train(rank: int, options: dict[str, Any]) -> tuple[list[float], int, int]:
    answers, norms_of = list[bool](), OffloadedGradient.norms_of

    def noted(self: OffloadedGradient, key: Any) -> list[torch.Tensor] | None:
        norms = norms_of(self, key)
        answers.append(norms is not None)
        return norms

    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(30, 30), nn.Tanh()) for _ in range(3)))
    call = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
    optimizer, seen = adamw(model.parameters()), []
    OffloadedGradient.norms_of = noted  # type: ignore[method-assign]
    try:
        for number in range(STEPS):
            loss = call(torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.item(), norm.item()]
    finally:
        OffloadedGradient.norms_of = norms_of  # type: ignore[method-assign]
    seen += [value.double().sum().item() for value in zinf_compile.full_state_dict(model).values()]
    return seen, sum(answers), len(answers) - sum(answers)
