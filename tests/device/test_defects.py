"""Defects that are put into the product on purpose: the device notices each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from late_training import PLACEMENTS, on_drives
from rank_defects import SEEDED, Seeded, found
from ranks import run_ranks

import zinf_compile

PLACES = {f"{seeded.place} on {seeded.ranks}": seeded for seeded in SEEDED.values()}


def shown(seeded: Seeded, name: str | None, folder: Path) -> list[set[str]]:
    """Return what each rank is shown where a defect is, with it or, without a name, without any."""
    options = on_drives(PLACEMENTS[seeded.place] if isinstance(seeded.place, str) else seeded.place, folder)
    try:
        if seeded.ranks == 1:
            return [found(0, 1, name, options)]
        return run_ranks(found, seeded.ranks, name, options, backend="late")
    finally:
        zinf_compile.reset()


@pytest.mark.parametrize("place", PLACES)
def test_without_one_nothing_is_noticed(place: str, tmp_path: Path) -> None:
    """With the delays, places and ranks with which defects are."""
    seeded = PLACES[place]
    assert shown(seeded, None, tmp_path) == [set()] * seeded.ranks


@pytest.mark.parametrize("name", SEEDED)
def test_each_is_noticed(name: str, tmp_path: Path) -> None:
    seeded = SEEDED[name]
    assert all(seeded.shows in each for each in shown(seeded, name, tmp_path))
