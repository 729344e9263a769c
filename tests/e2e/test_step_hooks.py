"""Hooks of a user's optimizer: what they change before a step counts in it, and what they change after it stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import vectors
from stepped_pairs import Pair
from torch import nn
from torch.optim import Optimizer
from training import assert_same
from twin_models import whole

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


def _members(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip_gradients(optimizer: Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(_members(optimizer), 0.01)


def change_gradients(optimizer: Optimizer, *_: Any) -> None:
    for number, p in enumerate(_members(optimizer)):
        p.grad.mul_((-1.0) ** number)


def replace_gradients(optimizer: Optimizer, *_: Any) -> None:
    for number, p in enumerate(_members(optimizer)):
        p.grad = p.grad * (-1.0) ** number


def halve_rate(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@torch.no_grad()
def halve_parameters(optimizer: Optimizer, *_: Any) -> None:
    for p in _members(optimizer):
        p.mul_(0.5)


@torch.no_grad()
def change_states(optimizer: Optimizer, *_: Any) -> None:
    for p in _members(optimizer):
        optimizer.state[p]["exp_avg"].mul_(0.1)


BEFORE = (clip_gradients, change_gradients, replace_gradients, halve_rate, halve_parameters)
AFTER = (halve_rate, halve_parameters, change_states)
TIERS = ("device", "nvme")


def _optimizers(pair: Pair) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) for model in pair.models]


def _compare(pair: Pair, optimizers: list[Optimizer]) -> None:
    for _ in range(3):
        for model, optimizer in zip(pair.models, optimizers, strict=True):
            model(*vectors(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(*(model.parameters() for model in pair.models), strict=True):
        assert_same("parameter", one.detach(), whole(other.detach()))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("register", "hook"),
    [*(("register_step_pre_hook", hook) for hook in BEFORE), *(("register_step_post_hook", hook) for hook in AFTER)],
)
def test_what_a_hook_changes_counts(register: str, hook: Callable[..., None], tier: str, drive: Path) -> None:
    pair = Pair(drive, tier=tier, train=False)
    optimizers = _optimizers(pair)
    for optimizer in optimizers:
        getattr(optimizer, register)(hook)
    _compare(pair, optimizers)


@pytest.mark.parametrize("tier", TIERS)
def test_an_exception_before_a_step_leaves_all_as_it_was(tier: str, drive: Path) -> None:
    pair = Pair(drive, tier=tier, train=False)
    optimizers = _optimizers(pair)
    _compare(pair, optimizers)

    def fail(*_: Any) -> None:
        raise KeyError("in a hook")

    for model, optimizer in zip(pair.models, optimizers, strict=True):
        model(*vectors(2)).backward()
        handle = optimizer.register_step_pre_hook(fail)
        with pytest.raises(KeyError, match="in a hook"):
            optimizer.step()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
    _compare(pair, optimizers)


def test_what_a_hook_may_not_return_is_refused_as_by_pytorch(drive: Path) -> None:
    pair = Pair(drive, tier="device")
    for optimizer in pair.optimizers:
        optimizer.register_step_pre_hook(lambda *_: "else")
        with pytest.raises(RuntimeError, match="must return None or a tuple of"):
            optimizer.step()


def _register(optimizer: Optimizer) -> list[str]:
    """Register a hook that removes itself, one that hands a closure to the step, and one behind it; return their calls."""
    seen: list[str] = []

    def once(*_: Any) -> None:
        seen.append("once")
        handle.remove()

    def given(_: Optimizer, args: Any, kwargs: Any) -> Any:
        seen.append("given")
        return (args[0], lambda: seen.append("closure")), kwargs

    handle = optimizer.register_step_pre_hook(once)
    optimizer.register_step_pre_hook(given)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    return seen


@pytest.mark.parametrize("tier", TIERS)
def test_hooks_that_remove_themselves_or_change_what_a_step_is_given(tier: str, drive: Path) -> None:
    pair = Pair(drive, tier=tier, train=False)
    optimizers = _optimizers(pair)
    calls = [_register(optimizer) for optimizer in optimizers]
    _compare(pair, optimizers)
    assert calls[0] == calls[1] == ["once", *["given", "closure", "after"] * 3]
