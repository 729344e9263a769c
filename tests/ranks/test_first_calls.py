"""What a model has before its first call on several ranks: buffers and gradients that were loaded, gradients of eager code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_first_calls import buffers_by_dcp, gradients_before_its_first_call, loaded_before_its_first_call
from ranks import run_ranks
from same_leaves import assert_equal

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

NVME: dict[str, Any] = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}


@pytest.mark.parametrize("meta", [False, True], ids=["made", "on meta"])
@pytest.mark.parametrize(
    ("size", "options"), [(2, {}), (3, {}), (2, {"reduce_grads": "step"}), (3, NVME)], ids=["2", "3", "2, at the step", "3, nvme"]
)
def test_a_load_goes_on_as_the_run_that_was_saved(size: int, options: dict[str, Any], meta: bool, tmp_path: Path) -> None:
    options = {**options, "nvme": str(tmp_path)} if "params" in options else options
    results = run_ranks(loaded_before_its_first_call, size, str(tmp_path / "saved"), options, meta)
    for expected, found in results:
        assert_equal(found, expected)
    assert not torch.equal(results[0][0][4], results[1][0][4]), "each rank has its own running mean"


@pytest.mark.parametrize(("size", "place"), [(2, "memory"), (2, "nvme"), (3, "memory")])
def test_gradients_of_eager_code_are_averaged(size: int, place: str, tmp_path: Path) -> None:
    options = {**NVME, "nvme": str(tmp_path)} if place == "nvme" else {}
    for found, expected in run_ranks(gradients_before_its_first_call, size, options):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_dcp_saves_the_buffers_of_rank_0(tmp_path: Path) -> None:
    for (mean,) in run_ranks(buffers_by_dcp, 2, str(tmp_path / "saved")):
        assert mean.eq(1).all()
