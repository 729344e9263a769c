"""States of PyTorch's schedulers and of its GradScaler are plain values: they come back from JSON as they were, and go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from zinf_compile.checkpoint.plain_values import decode, encode

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.4, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.4, 20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [2, 3])], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, "extra", tensors), allow_nan=False)), "extra", tensors)


def build(kind: str) -> tuple[torch.optim.Optimizer, Any]:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    return optimizer, SCHEDULERS[kind](optimizer)


def rates(kind: str, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        optimizer.step()
        scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step\\(\\).*")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on(kind: str) -> None:
    optimizer, scheduler = build(kind)
    rates(kind, optimizer, scheduler, 4)
    saved, settings = through_json(scheduler.state_dict()), through_json(optimizer.state_dict()["param_groups"])
    assert saved == scheduler.state_dict()
    again, its = build(kind)
    again.load_state_dict({"state": {}, "param_groups": settings})
    its.load_state_dict(saved)
    assert rates(kind, again, its, 6) == rates(kind, optimizer, scheduler, 6)
    if kind == "MultiStepLR":
        assert its._get_closed_form_lr() == scheduler._get_closed_form_lr()


def test_a_grad_scaler_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    state = {**scaler.state_dict(), "_growth_tracker": 2}
    assert through_json(state) == state
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(through_json(state))
    assert again.state_dict() == state
