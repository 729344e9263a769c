"""Averages of weights that were made before the model was partitioned: modules of whole parameters, which stay whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from tiers import compiled, options_for
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import assert_same, whole_gradient
from twin_models import Twins

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

Update = Callable[[nn.Module, nn.Module], None]


def by_data(average: nn.Module, model: nn.Module) -> None:
    """As loops of old do it, past autograd."""
    for mine, p in zip(average.parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(p.data, alpha=0.1)


@torch.no_grad()
def by_parameter(average: nn.Module, model: nn.Module) -> None:
    """The parameters themselves, and what is computed from both."""
    for mine, p in zip(average.parameters(), model.parameters(), strict=True):
        mine.lerp_(p, 0.25)
        mine.copy_(0.5 * mine + 0.5 * p)


@torch.no_grad()
def by_state_dict(average: nn.Module, model: nn.Module) -> None:
    """As libraries of averages do it."""
    for mine, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mine.copy_(0.9 * mine + 0.1 * value)


@torch.no_grad()
def by_foreach(average: nn.Module, model: nn.Module) -> None:
    """All in one call, gradients too."""
    own, theirs = list(average.parameters()), list(model.parameters())
    torch._foreach_lerp_(own, theirs, 0.25)
    torch._foreach_add_([p.detach() for p in own], [p.grad for p in theirs], alpha=0.1)  # type: ignore[call-overload]


@torch.no_grad()
def by_out(average: nn.Module, model: nn.Module) -> None:
    """Into memory that is there."""
    for mine, p in zip(average.parameters(), model.parameters(), strict=True):
        torch.add(mine, p, alpha=0.5, out=mine.detach())


def pair_with(make: Callable[[nn.Module], nn.Module], folder: Path) -> tuple[Twins, list[Any]]:
    """Return an eager model, its twin on a drive, and the module that was made of each before its first call."""
    pair = Twins(Mlp, lambda model: compiled(model, options_for(("nvme",) * 3, folder, piece=32)))
    return pair, [make(model) for model in pair.models]


def backward(model: Any, optimizer: Any) -> None:
    """Take a step and leave gradients."""
    optimizer.zero_grad()
    model(*vectors(1)).backward()
    optimizer.step()


@pytest.mark.parametrize("update", [by_data, by_parameter, by_state_dict, by_foreach, by_out])
def test_a_copy_made_before_follows(update: Update, drive: Path) -> None:
    pair, copies = pair_with(copy.deepcopy, drive)
    for _ in range(2):
        pair.each(backward)
        pair.each(lambda model, copied: update(copied, model), copies)
    for (name, one), other in zip(copies[0].named_parameters(), copies[1].parameters(), strict=True):
        assert type(other) is nn.Parameter
        assert_same(name, one.detach(), other.detach())


def test_an_averaged_model_made_before_follows(drive: Path) -> None:
    pair, averaged = pair_with(lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), drive)
    for _ in range(3):
        pair.each(backward)
        pair.each(lambda model, average: average.update_parameters(model), averaged)
    for (name, one), other in zip(averaged[0].state_dict().items(), averaged[1].state_dict().values(), strict=True):
        assert_same(name, one, other)
    assert_same("evaluated", *[average(*vectors(4)).detach() for average in averaged])


def test_other_whole_tensors_stay_whole(drive: Path) -> None:
    """A part of another one, of another shape, of another type of number."""
    pair, _ = pair_with(copy.deepcopy, drive)
    pair.each(backward)
    expected, found = [model.get_parameter("first.weight") for model in pair.models]
    wholes = [[torch.zeros(26, 7), torch.zeros(2, 13, 7), torch.zeros(13, 7, dtype=torch.float64)] for _ in pair.models]
    with torch.no_grad():
        for weight, (large, stacked, wide) in zip((expected, found), wholes, strict=True):
            large[:13].copy_(weight)
            stacked.add_(weight)
            wide[:].copy_(weight)
    for one, other in zip(*wholes, strict=True):
        assert type(other) is torch.Tensor
        assert_same("whole", one, other)


def test_a_gathered_value_has_a_gradient(drive: Path) -> None:
    pair, copies = pair_with(copy.deepcopy, drive)
    pair.each(backward)
    for model, beside in zip(pair.models, copies, strict=True):
        model.zero_grad()
        target = beside.get_parameter("first.weight").detach()  # which shares its memory
        target.copy_(model.get_parameter("first.weight"))
        target.square().sum().backward()
        assert type(target) is torch.Tensor
    one, other = (model.get_parameter("first.weight") for model in pair.models)
    assert_same("gradient", one.grad, whole_gradient(other))
