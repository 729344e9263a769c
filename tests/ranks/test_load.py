"""Loads on several ranks: bad input is an error on all of them, and each reads the bytes that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_load import failed, read_bytes, stepped
from ranks import run_ranks

pytestmark = pytest.mark.distributed

ALL_AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")


def away(folder: Path) -> dict[str, Any]:
    return {**ALL_AWAY, "nvme": str(folder), "timeout_s": 60}


@pytest.mark.parametrize("place", ["memory", "drive"])
def test_bad_input_is_an_error_on_all_ranks(place: str, tmp_path: Path) -> None:
    run_ranks(failed, 2, str(tmp_path), {"timeout_s": 60} if place == "memory" else away(tmp_path))


def test_a_step_that_failed_on_one_rank(tmp_path: Path) -> None:
    pieces = {"compute_shape": {"piece_numel": 256}}
    for size in (1, 2):
        run_ranks(stepped, size, str(tmp_path / str(size)), {**away(tmp_path), **pieces})


def test_each_rank_reads_what_it_needs(tmp_path: Path) -> None:
    run_ranks(read_bytes, 2, str(tmp_path), away(tmp_path))
    for read, needed in run_ranks(read_bytes, 3, str(tmp_path), away(tmp_path)):
        assert needed <= read <= needed + 9000, (read, needed)
