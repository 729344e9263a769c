"""Which blocks run again is decided by all ranks together: the gathers that they need are collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
from marks import more
from rank_remade import compile_again_alone, train_with_room_for_some
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
]


@pytest.mark.parametrize("drive", [more(False), True])
def test_the_same_blocks_run_again_on_all_ranks(drive: bool, tmp_path: Path) -> None:
    """The second one has half the tokens: it has room for more than the first, and still makes the same values again."""
    more_tokens, fewer = run_ranks(train_with_room_for_some, 2, str(tmp_path) if drive else "")
    again = [decided["recompute"] for decided in more_tokens]
    assert again == [2 * decided["recompute"] for decided in fewer]
    assert again[0] >= again[1] >= again[2] == 0
    assert again[0] > 0


def test_a_rank_that_compiles_again_alone_keeps_to_what_was_agreed() -> None:
    for decided in run_ranks(compile_again_alone, 2):
        assert decided["recompute"] > 0
