from __future__ import annotations

import torch
from irtext import each_a_tile, example_of, graph_of, lines_of, text_of, unit
from torch import fx

from zinf_compile.passes.tiling.sink_tile_gradients import sink_tile_gradients

INPUTS = {
    **{name: torch.empty(4, 4) for name in ("x", "d_0", "d_1", "y_0", "y_1")},
    "w_tile_0": unit(4, 4),
    "w_tile_1": unit(4, 4),
}
BEFORE = """
g_0 = mm(d_0, x); g_1 = mm(d_1, x); a = mm(y_0, w_tile_0); b = addmm(a, y_1, w_tile_1)
r = reduce_scatter(g_0, w_tile_0); s = reduce_scatter(g_1, w_tile_1)
"""


def graph(text: str, *, tiles: bool = True) -> fx.GraphModule:
    gm = graph_of(text, **INPUTS)
    return each_a_tile(gm) if tiles else gm


def test_docstring_example() -> None:
    shown_before, shown_after = example_of(sink_tile_gradients)
    gm = graph(BEFORE)
    assert lines_of(text_of(gm)) == lines_of(BEFORE) == shown_before
    assert lines_of(text_of(sink_tile_gradients(gm))) == shown_after


def test_without_another_use_each_follows_what_it_is_made_from() -> None:
    gm = graph(
        "t = t(d_0); g_0 = mm(t, x); g_1 = mm(d_1, t); r = reduce_scatter(g_0, w_tile_0); s = reduce_scatter(g_1, w_tile_1)"
    )
    assert [line.split(" =")[0] for line in lines_of(text_of(sink_tile_gradients(gm)))] == ["t", "g_0", "r", "g_1", "s"]


def test_what_others_read_stays() -> None:
    text = "g_0 = mm(d_0, x); a = mm(y_0, w_tile_0); c = relu(g_0); r = reduce_scatter(g_0, w_tile_0); return (c,)"
    assert lines_of(text_of(sink_tile_gradients(graph(text)))) == [
        "g_0 = mm(d_0, x)",
        "a = mm(y_0, w_tile_0)",
        "r = reduce_scatter(g_0, w_tile_0)",
        "c = relu(g_0)",
        "return (c,)",
    ]


def test_whole_parameters_are_left_alone() -> None:
    gm = graph(BEFORE, tiles=False)
    assert lines_of(text_of(sink_tile_gradients(gm))) == lines_of(BEFORE)
