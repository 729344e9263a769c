"""Gradients off the device that eager code makes, overwrites or changes: while they are on their way, and tile by tile."""

from __future__ import annotations

import contextlib
import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from tiers import compiled, context_of, options_for
from torch import nn
from training import adamw, assert_same, whole_gradient

import zinf_compile
from zinf_compile.errors import StepFailedError
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.units.offloaded_gradient import OffloadedGradient

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


class One(nn.Module):
    """One parameter: nothing else waits for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_a_gradient_overwritten_on_its_way_to_its_tier_stays_overwritten(tier: str, tmp_path: Path) -> None:
    """`view(-1)` gives operators on shards, of which `zero_` and `copy_` don't read what they change."""
    device = SimulatedDevice()
    with simulating(device) if tier == "host" else contextlib.nullcontext():
        model = compiled(One(), options_for((tier, tier, tier), tmp_path))
        weight: Any = model.weight
        model(torch.ones(2, 9)).backward()
        lane = device.links["to host"]._lane if tier == "host" else context_of(model).lanes.swap
        for overwrite, expected in (("zero_", torch.zeros(9, 4)), ("copy_", torch.ones(9, 4))):
            model.zero_grad()
            lane.submit(lambda: None).wait()
            late = threading.Event()
            lane.submit(lambda late=late: late.wait(60))  # type: ignore[misc]
            model(torch.ones(2, 9)).backward()
            threading.Timer(1.0, late.set).start()
            view = weight.grad.view(-1)
            view.zero_() if overwrite == "zero_" else view.copy_(weight.detach().view(-1))
            lane.submit(lambda: None).wait()
            assert_same(overwrite, expected, whole_gradient(weight))


def test_a_gradient_made_like_its_parameter_before_the_first_graph(tmp_path: Path) -> None:
    """It is partitioned like the parameter; Dynamo describes it, with the parameter, when it traces."""
    options, eager = options_for(("nvme", "nvme", "nvme"), tmp_path), Mlp()
    with zinf_compile.partitioned(**options):
        ours = Mlp()
    zinf_compile.load_full_state_dict(ours, eager.state_dict())
    for model in (eager, compiled(ours, options)):
        optimizer = adamw(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter, requires_grad=False)
        model(*vectors(0)).backward()
        optimizer.step()
    for name, value in zinf_compile.full_state_dict(ours).items():
        assert_same(name, eager.state_dict()[name], value)


def test_gradients_of_16_bit_parameters_that_eager_code_computes(tmp_path: Path) -> None:
    """They live where the graph's do, in the type in which those are reduced."""
    eager = Mlp().bfloat16()
    ours = compiled(copy.deepcopy(eager), options_for(("nvme", "nvme", "nvme"), tmp_path, master="float32"))
    with torch.no_grad():
        ours(*(value.bfloat16() for value in vectors(0)))
    optimizer = adamw(ours.parameters())
    for model in (eager, ours):
        torch.stack([p.float().square().sum() for p in model.parameters()]).sum().backward()
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert other.grad.kept_dtype is torch.float32  # type: ignore[union-attr]
        assert_same(name, one.grad, whole_gradient(other))
    optimizer.step()
    zinf_compile.synchronize()


@pytest.mark.parametrize("when", ["before the first tile", "after it"])
def test_a_change_that_ends_between_tiles(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of which some tiles are changed is not read again; one of which none is, is what it was."""
    model = compiled(Mlp(), options_for(("nvme", "nvme", "nvme"), tmp_path, tile=64))
    model(*vectors(0)).backward()
    weight: Any = model.get_parameter("first.weight")
    assert len(weight._zinf_unit.tiles) > 1
    before = whole_gradient(weight)
    assert before is not None
    really, stored = OffloadedGradient.store_part, []

    def store_part(gradient: OffloadedGradient, tile: Any, part: torch.Tensor) -> None:
        really(gradient, tile, part)
        stored.append(tile)

    def load_part(gradient: OffloadedGradient, tile: Any) -> torch.Tensor:
        if len(stored) == (when == "after it"):
            raise KeyError("lost")
        return gradient.load_piece(tile.span.place, tile.span.place + tile.shard_numel)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadedGradient, "store_part", store_part)
        patch.setattr(OffloadedGradient, "load_part", load_part)
        with pytest.raises(KeyError if when != "after it" else StepFailedError, match="lost"):
            weight.grad.mul_(torch.full_like(before, 2.0))
    if when == "after it":
        with pytest.raises(StepFailedError, match=r"mul_\(\) of first.weight ended in its middle"):
            weight.grad.norm()
    else:
        assert_same("gradient", before, whole_gradient(weight))
    model.zero_grad()
    model(*vectors(0)).backward()
    assert_same("gradient", before, whole_gradient(weight))
