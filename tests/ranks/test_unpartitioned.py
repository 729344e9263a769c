"""Parameters that no graph uses train like the rest on several ranks."""

from __future__ import annotations

import pytest
import rank_unpartitioned
from marks import more
from ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("way", ["broken", *(more(way) for way in ("regional", "whole"))])
def test_gradients_are_averaged_whether_a_graph_uses_the_parameter_or_not(way: str) -> None:
    assert run_ranks(rank_unpartitioned.train, 2, way) == [[], []]


def test_values_that_differ_between_ranks_are_an_error_on_all_of_them() -> None:
    for message in run_ranks(rank_unpartitioned.other_seeds, 2):
        assert "parameter head.weight is used outside the compiled graphs" in message or "head.bias" in message
        assert "seed all ranks alike" in message
