"""A cap that is too small for its own default tiles, on one of several ranks."""

from __future__ import annotations

import pytest
from rank_smaller_tiles import TILE, cut_already, smaller_tiles
from ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")
def test_all_ranks_have_the_same_smaller_tiles() -> None:
    for tiles, losses, expected in run_ranks(smaller_tiles, 2):
        assert tiles[1] < tiles[0] == TILE
        assert losses == expected


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")
def test_shards_of_parameters_that_are_partitioned_stay_as_they_are() -> None:
    """The error says so, and what to do."""
    for refused, accepted in run_ranks(cut_already, 2):
        assert "That is less than is allowed, and makes smaller tiles: option tile does so as well" in refused
        assert accepted == ""
