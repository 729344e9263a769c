"""Parameters that stay ordinary ones on a device with memory of its own, and leave it once an option says so."""

from __future__ import annotations

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
