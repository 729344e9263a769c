"""Closures on one of several ranks: the first compiled call comes inside of the first step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import schedulefree
import torch
from tiers import compiled, options_for, sundry, words
from torch.optim import Optimizer
from training import adamw

import zinf_compile
from zinf_compile.errors import PartitionedParameterError


def train(rank: int, size: int, folder: str) -> None:
    """Train with states in memory and on drives, the first call inside or before the first step: the same parameters."""
    results: list[Any] = []
    for placement, inside in ((("device",) * 3, True), (("device", "device", "nvme"), False), (("nvme",) * 3, True)):
        model = sundry()
        compiled(model, options_for(placement, folder, piece=128))
        optimizer = adamw(model.parameters())
        if not inside:
            with torch.no_grad():
                model(words(0, 0, rank))

        def closure(number: int, model: Any = model, optimizer: Optimizer = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(words(number, 0, rank))
            loss.backward()
            return loss

        for number in range(3):
            optimizer.step(partial(closure, number))
            if number == 1:
                _use_states(model, optimizer)
        results.append({name: value.tolist() for name, value in zinf_compile.full_state_dict(model).items()})
    assert results[1] == results[0], "the placement never changes a bit"
    assert results[2] == results[0], "the placement never changes a bit"
    _refuse_eval(rank)


def _use_states(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Restart a moment, take a parameter's states out, read what is this rank's."""
    parameters = [p for p in model.parameters() if p.requires_grad and p.dim()]
    optimizer.state[parameters[0]]["exp_avg"].mul_(0.5)
    optimizer.state.pop(parameters[1])
    state = optimizer.state[parameters[2]]
    assert "zinf_layout" in state
    assert state["exp_avg_sq"].shape == (-(-parameters[2].numel() // 2),)


def _refuse_eval(rank: int) -> None:
    model = sundry()
    compiled(model, {})
    optimizer = schedulefree.AdamWScheduleFree(model.parameters())
    optimizer.train()
    model(words(0, 0, rank)).backward()
    optimizer.step()
    with pytest.raises(
        PartitionedParameterError, match=r"^AdamWScheduleFree.eval\(\) calls lerp_\(\) of parameter .*full_optimizer_state_dict"
    ):
        optimizer.eval()
