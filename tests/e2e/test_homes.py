"""Homes of their own for each parameter's values, gradient and states: the same bits, wherever each of them lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from rank_homes import train_mixtures, train_strays
from rank_tiers import Build
from rank_tiling import wide
from tiers import sundry

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@pytest.mark.parametrize(
    ("apart", "dtype", "build", "given"),
    [
        (False, torch.float32, sundry, {}),
        (True, torch.bfloat16, wide, {"master": "float32", "tile": 400}),
        more(True, torch.float32, sundry, {}),
        more(False, torch.float32, wide, {"tile": 800}),
    ],
)
def test_bits_of_drawn_mixtures(apart: bool, dtype: torch.dtype, build: Build, given: dict[str, Any], tmp_path: Path) -> None:
    seeds = range(3)
    assert train_mixtures(0, 1, str(tmp_path), dtype, seeds, apart=apart, build=build, given=given) == len(seeds)


@pytest.mark.parametrize(("apart", "tile"), [(False, None), (True, 800), more(True, None), more(False, 800)])
def test_a_graph_is_called_with_units_at_other_homes(apart: bool, tile: int | None, tmp_path: Path) -> None:
    near, far, between = ("device",) * 3, ("nvme",) * 3, ("host", "nvme", "device")
    for homes in ([near, far, between, near], [between, near, far, far], [far, near, between, near]):
        assert train_strays(0, 1, str(tmp_path), homes, apart=apart, tile=tile) == 4
