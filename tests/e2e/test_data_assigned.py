"""`tensor.data = value` of gradients and of tensors that are partitioned like a parameter: what eager PyTorch makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from stepped_pairs import Pair
from tiers import compiled, options_for
from training import assert_same, whole_gradient
from twin_models import Twins, whole

from zinf_compile.errors import PartitionedParameterError

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

TIERS = ["device", "nvme"]


def pair_on(tier: str, folder: Path) -> Twins:
    return Pair(folder, tier=tier) if tier == "nvme" else Twins(Mlp, lambda m: compiled(m, options_for((tier,) * 3, folder)))


def step_after(change: Callable[[Any], None]) -> Callable[[Any, Any], torch.Tensor]:
    """Return a step whose gradients are changed before the update."""

    def step(model: Any, optimizer: Any) -> torch.Tensor:
        loss = model(*vectors(1))
        loss.backward()
        change(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    return step


def halve(model: Any) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data / 2


def replace_whole(model: Any) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad.data = torch.full(p.shape, 0.01 * number)


def swap_and_swap_back(model: Any) -> None:
    """What was taken from `data` keeps its values, and is given back, changed meanwhile."""
    for p in model.parameters():
        taken = p.grad.data
        p.grad.data = p.grad * 3
        p.grad.data.mul_(0.5)
        other, p.grad.data = p.grad.data, taken
        p.grad.data = p.grad.data
        p.grad.add_(other)


def set_values(model: Any) -> None:
    for p in model.parameters():
        p.grad.set_(torch.full(p.shape, 0.02))


@pytest.mark.parametrize("tier", TIERS)
def test_gradients_take_what_is_assigned_to_their_data(tier: str, tmp_path: Path) -> None:
    pair = pair_on(tier, tmp_path)
    for change in (halve, replace_whole, swap_and_swap_back, set_values, halve):
        pair.each(step_after(change))


@pytest.mark.parametrize("tier", TIERS)
def test_gradients_that_are_assigned_accumulate(tier: str, tmp_path: Path) -> None:
    pair = pair_on(tier, tmp_path)

    def twice(model: Any, _: Any) -> torch.Tensor:
        model(*vectors(1)).backward()
        halve(model)
        loss = model(*vectors(2))
        loss.backward()
        return loss  # type: ignore[no-any-return]

    pair.each(twice)
    for ours, eager in zip(pair.ours.parameters(), pair.eager.parameters(), strict=True):
        assert_same("gradient", eager.grad, whole_gradient(ours))


def test_what_does_not_fit_a_gradient_is_refused(tmp_path: Path) -> None:
    ours = pair_on("nvme", tmp_path).ours
    ours(*vectors(1)).backward()
    weight = ours.get_parameter("first.weight")
    before = whole_gradient(weight)
    assert before is not None
    for value in (torch.ones(3), weight.grad.double(), torch.ones(weight.shape, dtype=torch.int32)):
        with pytest.raises(PartitionedParameterError, match=r"gradient of first\.weight is partitioned as .* same shape, type"):
            weight.grad.data = value
    with pytest.raises(PartitionedParameterError, match="accepted by set_: a tensor of its shape"):
        weight.grad.set_()
    with pytest.raises(TypeError, match="is a tensor"):
        weight.grad.data = 3
    assert_same("gradient", before, whole_gradient(weight))


def test_tensors_like_a_parameter_take_what_is_assigned_to_their_data(drive: Path) -> None:
    pair = Pair(drive)
    found = []
    with torch.no_grad():
        for model in pair.models:
            weight = model.get_parameter("first.weight")
            average = weight.detach().clone()
            view, taken = average.view_as(average), average.data
            average.data = average.data * 0.5 + weight.data * 0.25
            average.mul_(2)
            again = average.clone()
            again.data = torch.full(weight.shape, 0.5)
            detached = weight.detach()
            detached.data = torch.zeros(weight.shape)  # that tensor alone, not the parameter
            found.append([view, taken, average, again, detached, weight.detach()])
    eager, ours = found
    for name, one, other in zip(("view", "taken", "average", "whole", "detached", "parameter"), eager, ours, strict=True):
        assert_same(name, one, whole(other))


def test_what_does_not_fit_such_a_tensor_is_refused(drive: Path) -> None:
    average = Pair(drive).ours.get_parameter("first.weight").detach().clone()
    with pytest.raises(PartitionedParameterError, match=r"like parameter first\.weight is partitioned as .* same shape, type"):
        average.data = torch.ones(3)
