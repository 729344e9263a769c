"""MLPs a slice of tokens at a time where ranks have other numbers of tokens: they gather alike, and sum what eager sums."""

from __future__ import annotations

import pytest
from rank_token_tiles import compare_on_a_rank
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_ranks_of_one_slice_and_of_three() -> None:
    assert run_ranks(compare_on_a_rank, 2, "fx") == ["", ""]
