"""Values that are noted to be drawn, and made later, each rank its own pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_from_meta
from marks import more
from ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [more(2), 3, more(4)])
def test_ranks_make_their_own_pieces_of_the_same_model(world_size: int, tmp_path: Path) -> None:
    assert all(run_ranks(rank_from_meta.deferred_on_ranks, world_size, str(tmp_path)))
