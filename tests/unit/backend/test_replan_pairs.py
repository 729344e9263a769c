"""Which graphs are planned again together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zinf_compile.backend.kept_graphs import KeptGraph
from zinf_compile.backend.replan_pairs import pairs_of


def kept(name: str) -> Any:
    return SimpleNamespace(name=name, number=KeptGraph.number.fget(SimpleNamespace(name=name)))  # type: ignore[attr-defined]


def record(*programs: str) -> Any:
    return SimpleNamespace(graphs=[SimpleNamespace(program=name) for name in programs])


F0, B0, F1, B1, E = (
    "forward of graph 0",
    "backward of graph 0",
    "forward of graph 1",
    "backward of graph 1",
    "inference of graph 2",
)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([[F0, B0]], {(F0, B0), (F1,), (B1,), (E,)}),
        ([[F0, B0, E, F0, B0], [F0, B0]], {(F0, B0), (F1,), (B1,), (E,)}),
        ([[F0, F1, B1, B0]], {(F1, B1), (F0,), (B0,), (E,)}),
        ([[F0, B0], [F0, E, B0]], {(F0,), (B0,), (F1,), (B1,), (E,)}),
        ([[B0, F0]], {(F0,), (B0,), (F1,), (B1,), (E,)}),
        ([], {(F0,), (B0,), (F1,), (B1,), (E,)}),
    ],
)
def test_a_forward_goes_with_the_backward_that_always_followed_it(steps: list[list[str]], expected: set[tuple[str, ...]]) -> None:
    graphs = [kept(name) for name in (F0, B0, F1, B1, E)]
    found = pairs_of(graphs, [record(*programs) for programs in steps])
    assert {tuple(each.name for each in together) for together in found} == expected
