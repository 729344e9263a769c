"""What training loops compute with parameters outside the graph, all states off the device: eager's numbers, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from models import IN, Mlp, MutatedBuffers, vectors
from tiers import compiled, options_for
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from training import BACKEND, adamw, assert_same, in_place
from twin_models import Twins, whole

import zinf_compile
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.units.shard_values import BackedShard
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]

Act = Callable[[Any, Any], Any]


class Pair(Twins):
    """An eager model and its twin with all states off the device, one step into their training."""

    def __init__(
        self,
        folder: Path,
        *,
        tier: str = "nvme",
        build: Callable[[], nn.Module] = Mlp,
        train: bool = True,
        piece: int | None = None,
    ) -> None:
        super().__init__(build, lambda model: compiled(model, options_for((tier, tier, tier), folder, piece=piece)))
        if train:
            self.each(step)

    def companions(self, make: Callable[[nn.Module], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Make tensors beside both."""
        return [make(model) for model in self.models]


def step(model: Any, optimizer: Any) -> torch.Tensor:
    """Take a step, most of which is still to be done when this returns."""
    loss = model(*vectors(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


def clones(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of all parameters, as an average begins with."""
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_averages_and_updates_by_hand(tier: str, tmp_path: Path) -> None:
    """In pieces, after steps that are still to be done, between parameters, gradients and tensors made from them."""
    with simulating(SimulatedDevice()):
        pair = Pair(tmp_path, tier=tier, piece=32)
        averages = pair.companions(clones)
        for copied in averages[1]:
            assert isinstance(copied, ShardedTensor)
            assert isinstance(copied.shard_values, BackedShard)
            assert copied.shard_values.backing.tier == tier

        @torch.no_grad()
        def average(model: nn.Module, averages: list[torch.Tensor]) -> None:
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.mul_(0.9).add_(parameter.detach(), alpha=0.1)
            torch._foreach_lerp_(averages, list(model.parameters()), 0.25)

        def by_hand(model: nn.Module, _: Any) -> None:
            model(*vectors(2)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.add_(p, alpha=0.01)
                    p.add_(p.grad, alpha=-0.1)
                    p.__isub__(0.1 * p.grad)  # type: ignore[attr-defined]
                    p.data.clamp_(-1.5, 1.5)
                torch._foreach_mul_(list(model.parameters()), 0.5)
            model.zero_grad()

        for _ in range(2):
            pair.each(step)
            pair.each(average, averages)
            pair.each(by_hand)
        for one, other in zip(*averages, strict=True):
            assert_same("average", one, whole(other))

        @torch.no_grad()
        def bring_back(model: nn.Module, averages: list[torch.Tensor]) -> None:
            torch._foreach_copy_(list(model.parameters()), averages)
            model.get_parameter("first.bias").zero_()
            model.get_parameter("norm.weight").fill_(0.5)
            momentum = torch.zeros_like(model.get_parameter("first.weight"))
            model.get_parameter("first.weight").add_(momentum.add_(averages[0]).neg_())
            average = averages[0].view(-1).mul_(2).view_as(averages[0])
            model.get_parameter("first.weight").data = average.clone()

        pair.each(bring_back, averages)
        pair.each(step)


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


class SharpnessAware:
    """As the scripts that people copy do it."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.old: dict[nn.Parameter, torch.Tensor] = {}
        self.base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def ascend(self) -> None:
        grads = [(torch.abs(p) * p.grad).norm(p=2) for p in self.parameters if p.grad is not None]
        scale = 0.05 / (torch.norm(torch.stack(grads), p=2) + 1e-12)
        for p in self.parameters:
            assert p.grad is not None
            self.old[p] = p.data.clone()
            p.add_(torch.pow(p, 2) * p.grad * scale.to(p))

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.parameters:
            p.data = self.old[p]
        self.base.step()
        self.base.zero_grad()


def test_sharpness_aware_steps_and_lookahead(drive: Path) -> None:
    pair = Pair(drive)
    optimizers = [SharpnessAware(model) for model in pair.models]
    slow = pair.companions(clones)

    def ascend_and_descend(model: nn.Module, sam: SharpnessAware) -> torch.Tensor:
        loss: torch.Tensor = model(*vectors(3))
        loss.backward()
        sam.ascend()
        sam.base.zero_grad()
        model(*vectors(3)).backward()
        sam.descend()
        return loss

    @torch.no_grad()
    def look_ahead(model: nn.Module, slow: list[torch.Tensor]) -> None:
        for mine, p in zip(slow, model.parameters(), strict=True):
            mine.add_(p.data - mine, alpha=0.5)
            p.copy_(mine)

    for _ in range(2):
        pair.each(ascend_and_descend, optimizers)
        pair.each(look_ahead, slow)


def test_weight_penalties_reach_the_gradients(drive: Path) -> None:
    pair = Pair(drive)
    anchors = pair.companions(clones)
    pair.each(step)

    def penalised(model: nn.Module, anchors: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(*vectors(2)) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        loss = loss + sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchors, strict=True))
        (loss + model.get_parameter("first.weight").norm()).backward()
        return loss

    pair.each(penalised, anchors)
    for one, other in zip(pair.eager.parameters(), pair.ours.parameters(), strict=True):
        assert_same("gradient", one.grad, other.grad.full_tensor())  # type: ignore[union-attr]
    pair.each(lambda model, optimizer: optimizer.step())
    penalty = pair.ours.get_parameter("first.weight").pow(2).sum()
    with torch.no_grad():
        pair.ours.get_parameter("first.weight").mul_(2)
    with pytest.raises(RuntimeError, match=r"first.weight was changed in place"):
        penalty.backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        pair.ours.get_parameter("first.weight").add_(1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, more({"avg_fn": get_ema_avg_fn(0.9)})],
    ids=["mean", "foreach", "each"],
)
def test_an_averaged_model_is_a_partitioned_twin(settings: dict[str, Any], drive: Path) -> None:
    pair = Pair(drive, build=MutatedBuffers)
    averaged = [AveragedModel(model, use_buffers=True, **settings) for model in pair.models]
    for parameter, own in zip(averaged[1].parameters(), pair.ours.parameters(), strict=True):
        assert isinstance(parameter, ShardedParameter)
        assert parameter is not own
        assert parameter._zinf_unit.placement.params == "nvme"
    for _ in range(3):
        pair.each(step)
        pair.each(lambda model, average: average.update_parameters(model), averaged)
    state = zinf_compile.full_state_dict(averaged[1])
    for name, value in averaged[0].state_dict().items():
        assert_same(name, value, state[name])
    averaged[1].compile(backend=BACKEND)
    with torch.no_grad():
        assert_same("evaluated", *[average(*vectors(4)) for average in averaged])
    for average in averaged:  # and it may be trained
        step(average, torch.optim.SGD(average.parameters(), lr=0.1))
    assert_same("trained", averaged[0].module.first.weight.detach(), whole(averaged[1].module.first.weight.detach()))


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


def test_what_needs_whole_values_is_refused_by_name(drive: Path) -> None:
    pair = Pair(drive)
    weight = pair.ours.get_parameter("first.weight")
    copied = weight.detach().clone()
    for act, name in (
        (lambda: copied[0], "select"), (lambda: copied @ torch.ones(7), "mv"), (copied.numpy, "numpy"), (copied.tolist, "tolist"),
        (lambda: copied.sum(0), "sum"), (lambda: copied + torch.ones(7), "add"), (copied.normal_, "normal_"),
        (lambda: copied * pair.ours.get_parameter("second.weight"), "mul"),
    ):  # fmt: skip
        with pytest.raises(PartitionedParameterError, match=rf"{name}.*parameter (first|second).weight"), torch.no_grad():
            act()
    with pytest.raises(PartitionedParameterError, match=r"^parameter\[\.\.\.\] = value,? reads parameter first\.weight"):
        weight[0] = 1.0


class Lookahead(Optimizer):
    """Keeps slow weights in its own state; PyTorch's hooks don't know of its step."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step(closure)
        for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
            slow.lerp_(p, 0.5)
            p.copy_(slow)


def test_an_optimizer_around_another_one(drive: Path) -> None:
    pair = Pair(drive, train=False)
    for model in pair.models:
        model(*vectors(0)).backward()
    optimizers = [Lookahead(optimizer) for optimizer in pair.optimizers]
    for _ in range(2):
        pair.each(lambda model, optimizer: optimizer.step(), optimizers)


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
