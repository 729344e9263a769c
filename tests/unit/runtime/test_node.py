"""Ranks of a node: as many as a launcher says, else as many as have exchanged its number."""

from __future__ import annotations

import pytest

from zinf_compile.runtime.system import node


@pytest.fixture(autouse=True)
def _uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(node, "_counted", set())


def test_one_rank_that_has_compared_nothing_is_alone() -> None:
    assert node.ranks_of_node() == 1


def test_ranks_of_other_nodes_are_not_counted() -> None:
    here = float(node.node_id())
    node.count_ranks([here, here + 1, here, here, here + 2])
    assert node.ranks_of_node() == 3


def test_the_largest_group_of_a_process_counts() -> None:
    here = float(node.node_id())
    node.count_ranks([here] * 4)
    node.count_ranks([here] * 2)
    assert node.ranks_of_node() == 4


def test_what_a_launcher_says_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    node.count_ranks([float(node.node_id())] * 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert node.ranks_of_node() == 8


def test_the_number_of_a_node_is_exact_as_a_double() -> None:
    assert int(float(node.node_id())) == node.node_id()
