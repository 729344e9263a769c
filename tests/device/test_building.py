"""Building models for the device on several ranks: values in host memory never go through the device's collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from late_training import on_drives
from rank_building import built, refuses
from ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
]


@pytest.mark.parametrize("options", [{}, {"tile": 4096}, {"params": "host"}, {"params": "nvme", "tile": 4096}], ids=str)
def test_a_model_is_built_without_collectives_of_the_device_for_the_host(options: dict[str, Any], tmp_path: Path) -> None:
    assert all(run_ranks(built, 2, on_drives(options, tmp_path), backend="late"))


def test_a_group_of_the_device_refuses_the_host() -> None:
    assert all(run_ranks(refuses, 2, backend="late"))
