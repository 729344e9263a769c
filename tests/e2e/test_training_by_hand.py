"""What training loops compute outside the graph, all states off the device: averages, penalties, optimizers around others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from models import MutatedBuffers, vectors
from stepped_pairs import Pair, clones, step
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from training import BACKEND, assert_same
from twin_models import whole

import zinf_compile
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.units.shard_values import BackedShard
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


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
