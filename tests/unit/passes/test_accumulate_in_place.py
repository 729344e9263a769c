from __future__ import annotations

import pytest
import torch
from irtext import example_of, graph_of, lines_of, text_of

from zinf_compile.passes.tiling.accumulate_in_place import accumulate_in_place

INPUTS = {name: torch.empty(4, 4) for name in ("x", "y", "w_tile_0", "w_tile_1", "bias")}


def after(text: str) -> list[str]:
    return lines_of(text_of(accumulate_in_place(graph_of(text, **INPUTS))))


def test_docstring_example() -> None:
    before, expected = example_of(accumulate_in_place)
    assert after("; ".join(before)) == expected


def test_a_sum_of_many() -> None:
    text = "a = mm(x, w_tile_0); b = addmm(a, y, w_tile_1); c = addmm(b, x, w_tile_1); return (c,)"
    assert after(text) == lines_of(text.replace("addmm(", "addmm_("))


@pytest.mark.parametrize(
    "text",
    [
        "a = addmm(bias, x, y); return (a,)",
        "a = mm(x, y); c = addmm(a, x, y); return (a, c)",
        "a = mm(x, y); c = addmm(a, x, y); d = relu(a); return (c, d)",
        "a = mm(x, y); c = addmm(a, a, y); return (c,)",
        "a = relu(x); c = addmm(a, x, y); return (c,)",
        "a = mm(x, y); t = t(a); c = addmm(t, x, y); return (c,)",
    ],
    ids=["an input", "returned too", "read again", "a factor too", "no product", "a view"],
)
def test_what_others_may_see_stays_as_it_is(text: str) -> None:
    assert after(text) == lines_of(text)
