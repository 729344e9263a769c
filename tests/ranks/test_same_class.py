"""Several models of one class, whose graphs Dynamo takes for further ones of one function."""

from __future__ import annotations

from typing import Any

import pytest
from rank_same_class import experts_of_other_rows, with_a_reference
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.mark.parametrize("size", [1, 2])
def test_each_is_compiled_once(size: int) -> None:
    """Partitioned only when it is called, the second one failed Dynamo's guard on a parameter's class at its next call."""
    for graphs, _ in run_ranks(with_a_reference, size, {}):
        assert graphs == [2, 2, 2]


def test_the_second_one_is_cut_into_tiles_too_where_only_they_fit() -> None:
    """It was refused as a graph of one rank alone, which can't change tiles; with less memory it fitted, and with more."""
    free: list[Any] = run_ranks(with_a_reference, 2, {})
    for (_, expected), (_, losses) in zip(free, run_ranks(with_a_reference, 2, {"device_memory": 8 << 20}), strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_rank_may_compile_alone_for_an_expert_that_nothing_has_used() -> None:
    """The second graph is that of all further experts, before each was called; for other rows one rank needs a third."""
    rows = [[5, 5, 9], [7, 6, 6]]
    found = run_ranks(experts_of_other_rows, 2, rows)
    assert [graphs for graphs, _, _ in found] == [[1, 2, 3], [1, 2, 2]]
    for _, losses, parameters in found:
        assert losses < 1e-5
        assert parameters < 1e-5
