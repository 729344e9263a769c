"""Operators on parameters outside the graph, all states off the device: eager's numbers, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import IN, Mlp, vectors
from stepped_pairs import Pair, clones, step
from tiers import compiled, options_for
from torch import nn
from training import adamw, assert_same, in_place
from twin_models import whole

import zinf_compile
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.tensor import ShardedTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

Act = Callable[[Any, Any], Any]


@torch.no_grad()
def swap_and_swap_back(model: Any, _: Any) -> None:
    """As evaluation with averages does, which keeps what it replaces."""
    backup = {name: p.data for name, p in model.named_parameters()}
    turned, again = model.second.weight.data.t(), model.second.weight.detach()
    for p in model.parameters():
        p.data = p.data.clone() * 2
    model(*vectors(2))
    assert torch.equal(whole(turned), whole(backup["second.weight"]).t())
    assert torch.equal(whole(again), whole(backup["second.weight"]))
    model.second.weight.data = torch.full((5, 13), 0.25)  # again, a whole one
    for name, p in model.named_parameters():
        p.data = backup[name]
    model.second.bias.data = model.second.bias.data


@torch.no_grad()
def exchange(model: Any, _: Any) -> None:
    one, other = model.first.bias, model.norm.weight
    one.data, other.data = other.data, one.data
    other.data.mul_(2)


@torch.no_grad()
def scale_as_vector(model: Any, _: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_what_was_taken_from_data_keeps_its_values_when_data_is_assigned(tier: str, tmp_path: Path) -> None:
    with simulating(SimulatedDevice()):
        pair = Pair(tmp_path, tier=tier, piece=32)
        for change in (swap_and_swap_back, exchange, scale_as_vector):
            pair.each(change)
            pair.each(step)


def test_data_is_not_assigned_under_a_state_dict_that_would_follow(drive: Path) -> None:
    pair = Pair(drive)
    weight = pair.ours.get_parameter("first.weight")
    state = pair.ours.state_dict()
    with pytest.raises(PartitionedParameterError, match=r"first\.weight can't be given other values .* state dict"):
        weight.data = weight.data * 2
    del state
    with pytest.raises(PartitionedParameterError, match=r"first\.weight is .* can't take over the memory"), torch.no_grad():
        weight.set_(torch.ones(weight.shape))
    for model in pair.models:
        model.get_parameter("first.weight").data = model.get_parameter("first.weight").data * 2
    pair.each(step)


def test_an_assignment_that_is_refused_leaves_what_was_taken(drive: Path) -> None:
    pair = Pair(drive, build=lambda: Mlp(IN))
    weight = pair.ours.get_parameter("first.weight")
    taken = weight.data
    for turned in (taken.t(), taken.clone().t()):
        with pytest.raises(PartitionedParameterError, match="in another order"):
            weight.data = turned
    pair.eager.get_parameter("first.weight").data.mul_(2)
    taken.mul_(2)
    pair.each(step)


def test_data_of_a_parameter_on_the_device_is_assigned_from_one_off_it(drive: Path) -> None:
    far = Pair(drive).ours
    near = compiled(Mlp(), options_for(("device", "device", "device"), drive))
    near(*vectors(1)).backward()
    weight = near.get_parameter("first.weight")
    for value in (far.get_parameter("first.weight").data, far.get_parameter("first.weight")):
        taken, before = weight.data, weight.data.clone()
        weight.data = value
        assert_same("what was taken", before, taken)
        assert_same("value", whole(far.get_parameter("first.weight").data), weight.detach())
        weight.data.zero_()
    far.get_parameter("first.bias").data = near.get_parameter("norm.weight")
    assert_same("value", near.get_parameter("norm.weight").detach(), whole(far.get_parameter("first.bias").data))


def test_norms_sums_and_dot_products(drive: Path) -> None:
    reductions: list[Callable[[Any, Any], torch.Tensor]] = [
        lambda p, g: p.norm(), lambda p, g: torch.linalg.vector_norm(p, 1), lambda p, g: (p * p).sum(), lambda p, g: p.sum(),
        lambda p, g: p.pow(2).mean(), lambda p, g: p.abs().max(), lambda p, g: p.amin(), lambda p, g: torch.isfinite(p).all(),
        lambda p, g: torch.dot(p.flatten(), g.flatten()), lambda p, g: torch.vdot(p.view(-1), p.view(-1)),
        lambda p, g: torch._foreach_norm([p, g])[1], lambda p, g: torch.tensor(torch.equal(p, p.clone())),
        lambda p, g: (p - g).double().norm(float("inf")), lambda p, g: torch.where(p > 0, p, g).sum(),
    ]  # fmt: skip
    pair = Pair(drive)
    for model in pair.models:
        model(*vectors(2)).backward()
    with torch.no_grad():
        for reduction in reductions:
            pair.each(lambda model, _, f=reduction: f(model.first.weight, model.first.weight.grad))  # type: ignore[misc]


def test_a_deep_copy_goes_its_own_way(drive: Path) -> None:
    for model in (in_place(Mlp()), compiled(Mlp(), options_for(("nvme",) * 3, drive))):
        step(model, adamw(model.parameters()))
        twin, before = copy.deepcopy(model), zinf_compile.full_state_dict(model)
        shared = copy.deepcopy([model.first, model.first])
        assert shared[0] is shared[1]
        with torch.no_grad():
            model.get_parameter("first.weight").zero_()
        found = zinf_compile.full_state_dict(twin)
        for name, value in before.items():
            assert_same(name, value, found[name])


def test_a_change_reaches_the_master_copy(drive: Path) -> None:
    """Beside the same model in memory, where PyTorch itself makes the change."""
    models = []
    for placement in (("device",) * 3, ("nvme",) * 3):
        torch.manual_seed(3)
        model = compiled(Mlp().to(torch.bfloat16), options_for(placement, drive, master="float32"))
        optimizer = adamw(model.parameters())
        for number in range(3):
            model(*[value.bfloat16() for value in vectors(number)]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.get_parameter("first.weight").mul_(1.5)
        models.append(zinf_compile.full_state_dict(model))
    for name, value in models[0].items():
        assert_same(name, value, models[1][name])


def test_a_tensor_made_before_is_partitioned_alike(drive: Path) -> None:
    pair = Pair(drive, train=False)
    averages = pair.companions(clones)
    kept = averages[1][0]
    pair.each(step)

    @torch.no_grad()
    def average(model: nn.Module, averages: list[torch.Tensor]) -> None:
        for average, p in zip(averages, model.parameters(), strict=True):
            average.lerp_(p, 0.5)

    pair.each(average, averages)
    assert type(kept) is ShardedTensor
    assert repr(kept) == "ShardedTensor(like first.weight, shape=[13, 7], dtype=torch.float32, rank 0 of 1)"
    for one, other in zip(*averages, strict=True):
        assert_same("average", one, whole(other))


def test_what_needs_whole_values_is_given_copies_that_nobody_writes_to(drive: Path) -> None:
    pair = Pair(drive)
    copied = pair.ours.get_parameter("first.weight").detach().clone()
    value = whole(copied)
    with torch.no_grad():
        for act in (lambda w: w[0], lambda w: w @ torch.ones(7), lambda w: w.sum(0), lambda w: w + torch.ones(7)):
            assert_same("value", act(value), act(copied))
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            copied[0].zero_()
        with pytest.raises(RuntimeError, match="size of tensor"):
            copied * pair.ours.get_parameter("second.weight")
    with pytest.raises(PartitionedParameterError, match=r"getitem__\(\).* like parameter first\.weight.*returns a part"):
        copied[0]
    with pytest.raises(PartitionedParameterError, match=r"dropout\(\).* like parameter first\.weight.*it changes values"):
        nn.functional.dropout(copied, inplace=True)
    assert_same("value", value, whole(copied))


def test_what_reads_memory_or_writes_whole_values_is_refused_by_name(drive: Path) -> None:
    pair = Pair(drive)
    weight = pair.ours.get_parameter("first.weight")
    copied = weight.detach().clone()
    for act, name in ((copied.numpy, "numpy"), (copied.tolist, "tolist"), (copied.normal_, "normal_")):
        with pytest.raises(PartitionedParameterError, match=rf"{name}.*parameter first\.weight"), torch.no_grad():
            act()
    with pytest.raises(PartitionedParameterError, match=r"^parameter\[\.\.\.\] = value,? reads parameter first\.weight"):
        weight[0] = 1.0


def test_tensors_of_other_shapes_are_not_equal(drive: Path) -> None:
    pair = Pair(drive)
    first, second = pair.ours.get_parameter("first.weight"), pair.ours.get_parameter("second.weight")
    assert first.shape != second.shape
    assert not torch.equal(first, second)
    assert not torch.equal(torch.ones(2, 3), first.detach())
    assert torch.equal(first, first.detach())


def test_a_trained_tensor_is_copied_to_a_detached_parameter(drive: Path) -> None:
    """As Lightning's StochasticWeightAveraging does, with gradients enabled."""
    pair = Pair(drive)
    weight = pair.ours.get_parameter("first.weight")
    trained = torch.nn.Parameter(torch.ones(weight.shape))
    detached = weight.detach().clone()
    detached.copy_(trained)
    assert torch.equal(detached, trained)
    with pytest.raises(PartitionedParameterError, match="whose gradient is not computed"):
        detached * 2
    assert (detached.numel(), detached.dim(), detached.is_floating_point()) == (trained.numel(), 2, True)
    detached.mul_(1.0)
    copied = torch.empty_like(weight).detach()
    copied.copy_(weight)
    copied.square().sum().backward()
    assert float((detached.detach() * 2).sum()) == 2 * trained.numel()
    detached.copy_(torch.zeros(weight.shape))
    assert float((detached * 2).sum()) == 0
    weight.detach().copy_(trained)
    assert torch.equal(weight.detach(), trained)
