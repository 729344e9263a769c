"""Defects that are put into the product on purpose: the device notices each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from late_training import PLACEMENTS, on_drives
from rank_defects import SEEDED, found
from ranks import run_ranks

import zinf_compile

PLACES = {f"{seeded.place} on {seeded.ranks}": seeded for seeded in SEEDED.values()}


@pytest.mark.parametrize("place", PLACES)
def test_without_one_nothing_is_noticed(place: str, tmp_path: Path) -> None:
    """With the delays, places and ranks with which defects are."""
    seeded = PLACES[place]
    options = on_drives(PLACEMENTS[seeded.place] if isinstance(seeded.place, str) else seeded.place, tmp_path)
    try:
        if seeded.ranks == 1:
            assert found(0, 1, None, options) == set()
        else:
            assert run_ranks(found, seeded.ranks, None, options, backend="late") == [set()] * seeded.ranks
    finally:
        zinf_compile.reset()


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
