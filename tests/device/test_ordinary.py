"""Parameters that stay ordinary ones on a device with memory of its own, and leave it once an option says so."""

from __future__ import annotations

import copy
from pathlib import Path

import late
import pytest
import torch
from late_training import Training, same, train
from rank_late import check
from torch import nn

import zinf_compile
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@pytest.mark.parametrize("drive", [False, True])
def test_where_nothing_moves_a_device_trains_as_the_cpu_does(drive: bool, tmp_path: Path) -> None:
    expected, _ = train("cpu", None)
    with late.delays(0.0005, seed=2, chance=0.3):
        found, _ = train("late", {"nvme": str(tmp_path)} if drive else {})
    check()
    assert same(found, expected)


def test_states_leave_the_device_once_an_option_says_so() -> None:
    expected, _ = train("cpu", None, layers=2)
    torch.compiler.reset()
    zinf_compile.reset()
    training = Training("late", {}, layers=2)
    away = {"compute": "fx", **dict.fromkeys(("params", "grads", "optimizer"), "host"), "update": "device"}
    losses = []
    with late.delays(0.0005, seed=3, chance=0.3):
        for step in range(3):
            losses += training.step(training.batches(step, 2))
            kinds = {type(parameter) for parameter in training.model.parameters()}
            assert kinds == {ShardedParameter if step else nn.Parameter}
            if step == 0:
                training.called = torch.compile(training.model, backend="zero_infinity", options=away)
        found = [loss.cpu() for loss in losses]
    check()
    assert same(found, expected)


def test_a_model_on_two_devices() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far, self.last = nn.Linear(7, 11), nn.Linear(11, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            middle = self.far(self.near(x).relu().to(self.far.weight.device))
            return self.last(middle.sin().to(self.last.weight.device)).square().mean()

    torch.manual_seed(7)
    eager = Halves()
    ours = copy.deepcopy(eager)
    ours.far.to("late")
    called = torch.compile(ours, backend="zero_infinity", options={"compute": "fx"})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (eager, ours)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 7)
        losses = []
        for model, optimizer in zip((eager, called), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(losses[0], losses[1])
    check()
    for expected, found in zip(eager.parameters(), ours.parameters(), strict=True):
        assert torch.equal(expected, found.detach().cpu())
    assert {(type(p), p.device.type) for p in ours.parameters()} == {(nn.Parameter, "cpu"), (nn.Parameter, "late")}
