from __future__ import annotations

import pytest
import torch
from irtext import each_a_tile, example_of, graph_of, lines_of, text_of, unit
from torch import fx

from zinf_compile.passes.graph.node_facts import mark_region
from zinf_compile.passes.tiling.reduce_tiles_in_place import reduce_tiles_in_place

INPUTS = {**{name: torch.empty(4, 4) for name in ("x", "d")}, "w_tile_0": unit(4, 4), "w_tile_1": unit(4, 4)}


def graph(text: str, *, tiles: bool = True) -> fx.GraphModule:
    gm = graph_of(text, **INPUTS)
    return each_a_tile(gm) if tiles else gm


def test_docstring_example() -> None:
    before, expected = example_of(reduce_tiles_in_place)
    assert lines_of(text_of(reduce_tiles_in_place(graph("; ".join(before))), buffer="r")) == expected


def test_views_that_end_where_they_began() -> None:
    text = "g = mm(d, x); t = t(g); u = t(t); s = reduce_scatter(u, w_tile_0)"
    assert lines_of(text_of(reduce_tiles_in_place(graph(text)))) == [
        "buffer = reduce_buffer(w_tile_0)",
        "mm_out(buffer, d, x)",
        "s = reduce_scatter(buffer, w_tile_0)",
    ]


def test_rooms_stand_in_front_of_their_region() -> None:
    gm = graph(
        "a = relu(x); c = sin(d); g = mm(c, a); h = mm(a, c); s = reduce_scatter(g, w_tile_0); r = reduce_scatter(h, w_tile_1)"
    )
    mark_region(next(node for node in gm.graph.nodes if node.name == "c"))
    assert [line.split(" =")[0].split("(")[0] for line in lines_of(text_of(reduce_tiles_in_place(gm)))] == [
        "a",
        "buffer",
        "buffer_1",
        "c",
        "mm_out",
        "mm_out",
        "s",
        "r",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "g = mm(d, x); t = t(g); s = reduce_scatter(t, w_tile_0)",
        "g = mm(d, x); s = reduce_scatter(g, w_tile_0); r = relu(g); return (r,)",
        "g = mm(d, x); a = relu(g); s = reduce_scatter(a, w_tile_0)",
        "s = reduce_scatter(d, w_tile_0)",
    ],
    ids=["in another order", "read besides", "no product", "an input"],
)
def test_what_is_no_product_for_the_tile_alone_stays_as_it_is(text: str) -> None:
    assert lines_of(text_of(reduce_tiles_in_place(graph(text)))) == lines_of(text)


def test_whole_parameters_are_left_alone() -> None:
    text = "g = mm(d, x); s = reduce_scatter(g, w_tile_0)"
    assert lines_of(text_of(reduce_tiles_in_place(graph(text, tiles=False)))) == lines_of(text)
