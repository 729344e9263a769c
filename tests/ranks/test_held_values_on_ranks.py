"""Parameters that eager code used, in the same forward, before a graph spread them over the ranks."""

from __future__ import annotations

import pytest
import rank_held_values
from ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_eager_code_before_a_graph_trains_what_both_use() -> None:
    run_ranks(rank_held_values.train, 2)
