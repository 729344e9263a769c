"""Loads onto a compiled model before its first call, which partitions what was loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tier_twins import check_same, twins
from tiers import Placement, compiled, options_for, sundry
from training import adamw

import zinf_compile

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@pytest.mark.parametrize("placement", [("nvme",) * 3, ("device", "device", "nvme"), ("device",) * 3])
def test_before_the_first_call(placement: Placement, tmp_path: Path) -> None:
    ours, optimizer, eager, other = twins(tmp_path, placement)
    folder = zinf_compile.save(tmp_path / "saved", ours, optimizer, extra={"step": 2})
    fresh = sundry()
    compiled(fresh, options_for(placement, tmp_path))
    its = adamw(fresh.parameters())
    assert zinf_compile.load(folder, fresh, its) == {"step": 2}
    check_same((fresh, its, eager, other), step=2, steps=2)
