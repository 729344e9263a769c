"""Compiled training on the device, with streams that are late: the CPU's bits, and ordered accesses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from late_training import PLACEMENTS, on_drives, same, train
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
