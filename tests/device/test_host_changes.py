"""Host memory that the host changes or reads while copies to and from it may be under way: as on the CPU, and in order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from late_training import PLACEMENTS, Training, same
from rank_late import check

import zinf_compile

Change = Callable[[Training, dict[str, Any]], object]


def _parameters(training: Training, change: Callable[[torch.Tensor], object]) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            change(parameter)


def _gradients(training: Training, change: Callable[[torch.Tensor], object]) -> None:
    for parameter in training.model.parameters():
        assert parameter.grad is not None
        change(parameter.grad)


CHANGES: dict[str, Change] = {
    "parameters multiplied": lambda training, saved: _parameters(training, lambda p: p.mul_(0.9)),
    "parameters overwritten": lambda training, saved: _parameters(training, lambda p: p.copy_(torch.ones_like(p))),
    "values loaded": lambda training, saved: zinf_compile.load_full_state_dict(training.model, saved["values"]),
    "states loaded": lambda training, saved: zinf_compile.load_full_optimizer_state_dict(
        training.optimizer, copy.deepcopy(saved["states"])
    ),
    "a checkpoint loaded": lambda training, saved: zinf_compile.load(saved["folder"], training.model, training.optimizer),
    "a checkpoint saved": lambda training, saved: zinf_compile.save(saved["folder"], training.model, training.optimizer),
    "gradients multiplied": lambda training, saved: _gradients(training, lambda grad: grad.mul_(0.5)),
    "gradients limited": lambda training, saved: torch.nn.utils.clip_grad_value_(training.model.parameters(), 0.01),
}


def _trained(device: str, options: dict[str, Any], change: Change, folder: Path) -> list[torch.Tensor]:
    torch.compiler.reset()
    zinf_compile.reset()
    training = Training(device, options)
    losses = [loss for step in range(2) for loss in training.step(training.batches(step, 1))]
    saved = {
        "values": {name: value * 0.5 for name, value in zinf_compile.full_state_dict(training.model).items()},
        "states": zinf_compile.full_optimizer_state_dict(training.optimizer),
        "folder": folder / device,
    }
    zinf_compile.save(saved["folder"], training.model, training.optimizer, wait=True)
    for step in range(2, 4):
        (batch,) = training.batches(step, 1)
        loss = training.called(batch)
        loss.backward()
        change(training, saved)
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(loss.detach())
    zinf_compile.wait_for_save()
    return [*(loss.cpu() for loss in losses), *zinf_compile.full_state_dict(training.model).values()]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_right_after_a_backward(change: str, tmp_path: Path) -> None:
    """The device is many milliseconds behind; nothing else is waited for in between."""
    expected = _trained("cpu", {}, CHANGES[change], tmp_path)
    with late.delays(0.005, seed=3, chance=0.3):
        found = _trained("late", PLACEMENTS["host"], CHANGES[change], tmp_path)
        torch.accelerator.synchronize()
    check()
    assert same(found, expected)
