"""Compiled training on the device, with streams that are late: the CPU's bits, and ordered accesses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from late_training import PLACEMENTS, Training, on_drives, same, train
from rank_late import check

SLOW_S = 0.002
"""The longest delay of each work of a stream."""


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return on_drives(PLACEMENTS[request.param], tmp_path)


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return train("cpu", None)[0]


@pytest.mark.parametrize("options", PLACEMENTS, indirect=True)
def test_bits_are_those_of_the_cpu_and_every_access_is_ordered(options: dict[str, Any], expected: list[torch.Tensor]) -> None:
    with late.delays(SLOW_S, seed=1):
        found, counts = train("late", options)
    assert same(found, expected)
    check(sum(counts, Counter()))
    assert counts[2]["copies of unpinned memory"] == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", ["host", "drive"], indirect=True)
def test_inference_before_and_between_steps(options: dict[str, Any], mode: Any) -> None:
    torch.compiler.reset()
    host, there = Training("cpu", None), Training("late", options)
    losses: list[list[torch.Tensor]] = []
    for training in (host, there):
        found: list[torch.Tensor] = []
        with late.delays(SLOW_S, seed=2):
            for step in range(3):
                with mode():
                    found += [training.called(batch).cpu() for batch in training.batches(9 + step, 2)]
                found += [loss.cpu() for loss in training.step(training.batches(step, 2))]
        losses.append(found)
    torch.accelerator.synchronize()
    assert same(losses[1], losses[0])
    check()
