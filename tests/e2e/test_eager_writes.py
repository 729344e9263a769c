"""Eager code that changes partitioned parameters on one process: bit for bit what it does to an eager model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import IN, Mlp, vectors
from tiers import compiled, options_for
from torch import nn
from training import assert_same, assert_same_models, plain_step
from twin_models import Twins

from zinf_compile import PartitionedParameterError

pytestmark = pytest.mark.keeps_graphs


class Pair(Twins):
    """An eager model and an equal partitioned one, one step into their training."""

    def __init__(self, *, inferred_first: bool = False) -> None:
        super().__init__(Mlp)
        if inferred_first:
            with torch.inference_mode():
                assert_same("loss", *(model(*vectors(8)) for model in self.models))
        self.train(0)

    def train(self, number: int) -> None:
        """Take a step on both; they must agree bit by bit."""
        self.step(vectors(number), number)

    def change(self, function: Callable[[Any], Any]) -> None:
        """Do the same to both and train on."""
        for model in self.models:
            torch.manual_seed(0)
            function(model)
        assert_same_models(*self.models, where="after the change")
        self.train(1)
        self.train(2)


def wide(model: Any) -> torch.Tensor:
    """Return a product that has a gradient function, of the shape of the first weight."""
    return model.second.weight.t() @ torch.ones(5, IN)


def merge(model: Any) -> None:
    model.first.weight.data += wide(model)  # as peft's merge_and_unload does
    model.first.weight.data -= 0.5 * wide(model)  # and as it unmerges
    model.second.weight.data *= 2


def assign_result(model: Any) -> None:
    model.first.weight.data = model.first.weight.data + wide(model)
    model.first.bias.data = model.first.bias * 2
    model.second.weight.data = nn.functional.normalize(model.second.weight.data, dim=1)
    model.norm.weight.data = model.norm.weight.data - 0.1 * model.norm.weight.grad


def swap_and_swap_back(model: Any) -> None:
    """As evaluation with averaged weights does."""
    before = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.full_like(p.data, 0.01)
    with torch.no_grad():
        model(*vectors(4))
    for name, p in model.named_parameters():
        p.data = before[name]


def exchange(model: Any) -> None:
    one, other = model.first.bias, model.norm.weight
    one.data, other.data = other.data, one.data


def tie(model: Any) -> None:
    model.first.bias.data = model.norm.weight.data


def assign_parameter(model: Any) -> None:
    model.first.bias.data = model.norm.weight
    model.norm.bias.data = nn.Parameter(torch.ones(13))


def change_what_was_assigned(model: Any) -> None:
    value = torch.ones(13, IN)
    model.first.weight.data = value
    model(*vectors(3))
    value.mul_(0.5)


def set_tensor(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.set_(torch.full((13, IN), 0.1))


def change_data(model: Any) -> None:
    model.first.weight.data.add_(wide(model), alpha=0.1)
    model.first.weight.data[:2] = 0
    model.first.weight.data[2:4].mul_(3)
    model.first.weight.detach().add_(wide(model))
    model.first.weight.detach().t().mul_(0.5)
    for chunk in model.second.weight.data.chunk(3):
        chunk.add_(1)
    model.second.bias.data.copy_(model.second.weight[:, 0])
    model.norm.weight.data.numpy()[:] += 1
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 2, model.parameters())


def change_without_grad(model: Any) -> None:
    with torch.no_grad():
        kept = model.first.weight.data
        model.first.weight[:2] = 0
        model.first.weight[1:3].mul_(3).add_(1)
        model.first.weight.view(-1)[3:9].fill_(2)
        model.second.weight += 1
        torch._foreach_mul_(list(model.parameters()), 0.5)
        model.norm.bias.masked_fill_(model.norm.bias < 0, 0.5).clamp_(-0.1, 0.1)
        torch.mul(model.second.bias, 2, out=model.second.bias)
    kept.add_(wide(model))
    nn.init.orthogonal_(model.second.weight)
    nn.init.trunc_normal_(model.first.bias)


def change_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        kept = model.first.weight.data
        model.first.weight.mul_(2)
        model.second.weight.data[:2] = 0
        for p in model.parameters():
            p.sub_(0.1 * p.grad)
    kept.add_(1)


CHANGES = [
    merge,
    assign_result,
    swap_and_swap_back,
    exchange,
    tie,
    assign_parameter,
    change_what_was_assigned,
    set_tensor,
    change_data,
    change_without_grad,
    change_in_inference_mode,
]


@pytest.mark.parametrize("inferred_first", [False, True], ids=["trained", "inferred first"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_eagers_and_is_seen_by_the_next_call(change: Callable[[Any], None], inferred_first: bool) -> None:
    Pair(inferred_first=inferred_first).change(change)


def add(model: Any) -> None:
    model.first.weight.add_(1)


def augment(model: Any) -> None:
    weight = model.first.weight
    weight += 1


def set_rows(model: Any) -> None:
    model.first.weight[:2] = 0


def test_a_change_in_place_that_autograd_would_record_is_refused_as_in_eager() -> None:
    pair = Pair()
    for change in (add, augment, set_rows):
        for model in pair.models:
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
                change(model)
    pair.train(1)


CHANGES_WITHOUT_GRAD: dict[str, Callable[[Any], Any]] = {
    "index": lambda p: p.__setitem__(0, 1.0),
    "operator": lambda p: p.__iadd__(1),
    "list": lambda p: torch._foreach_add_([p], 1.0),
    "out": lambda p: torch.mul(p.detach(), 2, out=p),
}


@pytest.mark.parametrize("name", CHANGES_WITHOUT_GRAD)
def test_a_change_between_forward_and_backward_is_noticed_as_in_eager(name: str) -> None:
    for model in Pair().models:
        loss = model(*vectors(1))
        with torch.no_grad():
            CHANGES_WITHOUT_GRAD[name](model.second.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("view", [False, True], ids=["all", "rows"])
def test_so_is_one_through_data_of_what_is_off_the_device(view: bool, tmp_path: Path) -> None:
    """There PyTorch notices nothing, and takes gradients with values that the forward hasn't seen. The value is kept."""
    pair = Twins(Mlp, lambda model: compiled(model, options_for(("nvme", "device", "device"), tmp_path)))
    pair.step(vectors(0), 0)
    for model in pair.models:
        loss = model(*vectors(1))
        data = model.second.weight.data[1:] if view else model.second.weight.data
        with torch.no_grad():
            data.copy_(torch.full((5 - view, 13), 0.5))
        refuses = pytest.raises(RuntimeError, match="modified by an inplace operation")
        with contextlib.nullcontext() if model is pair.eager else refuses:
            loss.backward()
        model.zero_grad()
    pair.step(vectors(2), 2)


def test_a_copy_is_not_written_to_as_another_type(tmp_path: Path) -> None:
    """An average off the device is a copy for calls that need all of it: bits that are written to that would be lost."""
    model = compiled(Mlp(), options_for(("nvme",) * 3, tmp_path))
    model(*vectors(0)).backward()
    with torch.no_grad():
        average = model.get_parameter("first.weight").detach().clone()
        bits = average.view(torch.uint8)
        assert_same("bits", average.full_tensor().view(torch.uint8), bits.clone())
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            bits.bitwise_xor_(torch.ones_like(bits))


@pytest.mark.parametrize("name", ["t_", "unsqueeze_", "squeeze_", "resize_", "set_"])
def test_a_change_of_shape_is_refused_by_name(name: str) -> None:
    pair = Pair()
    weight = pair.models[1].first.weight
    arguments = {"unsqueeze_": (0,), "resize_": (3, 2)}.get(name, ())
    message = rf"^{name}\(\) would change .* first.weight.*do that before"
    with (
        pytest.raises(PartitionedParameterError, match=message),
        torch.no_grad(),
    ):
        getattr(weight, name)(*arguments)
    pair.train(1)


def test_a_new_value_may_lie_in_memory_in_another_order() -> None:
    pair = Pair()
    weight = pair.models[1].first.weight
    value = torch.randn(IN, 13).t()
    weight.data = value
    assert weight.stride() == (IN, 1)
    assert_same("value", value, weight.detach())
    value = torch.tensor(0.5).expand(13, IN)
    weight.data = value
    assert_same("value", value, weight.detach())
    plain_step(pair.models[1], pair.optimizers[1], vectors(1))
