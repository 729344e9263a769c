"""A cap that is too small for its own default tiles, on one of several ranks."""

from __future__ import annotations

import pytest
from rank_smaller_tiles import TILE, smaller_tiles
from ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")
def test_all_ranks_have_the_same_smaller_tiles() -> None:
    for tiles, losses, expected in run_ranks(smaller_tiles, 2):
        assert tiles[1] < tiles[0] == TILE
        assert losses == expected
