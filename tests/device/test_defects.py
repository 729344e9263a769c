"""Defects that are put into the product on purpose: the device notices each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from late_training import PLACEMENTS, on_drives
from rank_defects import SEEDED, found
from ranks import run_ranks

import zinf_compile


@pytest.mark.parametrize("name", SEEDED)
def test_each_is_noticed(name: str, tmp_path: Path) -> None:
    seeded = SEEDED[name]
    options = on_drives(PLACEMENTS[seeded.place] if isinstance(seeded.place, str) else seeded.place, tmp_path)
    try:
        if seeded.ranks == 1:
            assert seeded.shows in found(0, 1, name, options)
        else:
            for shown in run_ranks(found, seeded.ranks, name, options, backend="late"):
                assert seeded.shows in shown
    finally:
        zinf_compile.reset()
