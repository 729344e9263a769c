from __future__ import annotations

import torch
from irtext import cut, example_of, graph_of, lines_of, text_of, unit
from torch import fx

from zinf_compile.passes.graph.node_facts import joined_outputs, parameters, tile_of
from zinf_compile.passes.tiling.lift_tiles import lift_tiles

BEFORE = """
a = tile(w, [0, 0], [4, 8])
y = mm(x, a)
s = reduce_scatter(g, a)
j = join_tiles([s, r], w)
return (y, j)
"""
AFTER = """
y = mm(x, w[0:4])
s = reduce_scatter(g, w[0:4])
return (y, s, r)
"""


def graph() -> fx.GraphModule:
    inputs = {"w": unit(8, 8), "x": torch.empty(2, 4), "g": torch.empty(4, 8), "r": torch.empty(4, 8)}
    return cut(graph_of(BEFORE, **inputs), 128)


def test_docstring_example() -> None:
    gm = lift_tiles(graph())
    assert text_of(gm) == AFTER.lstrip()
    shown_before, shown_after = example_of(lift_tiles)
    assert shown_before == lines_of(BEFORE)
    assert shown_after == [line.replace("w[0:4]", "w_tile_0") for line in lines_of(AFTER)]


def test_tiles_are_placeholders_behind_the_others() -> None:
    gm = lift_tiles(graph())
    assert [node.name for node in gm.graph.nodes if node.op == "placeholder"] == ["w", "x", "g", "r", "w_tile_0"]
    tile, slot = list(parameters(gm.graph))[-1]
    assert (tile_of(tile), slot.name, slot.shape, slot.key) == ("w", "w[0:4]", (4, 8), (0, 0))
    assert joined_outputs(gm) == {1: (1, 2)}


def test_without_tiles_nothing_changes() -> None:
    gm = graph_of("y = mm(x, w); return (y,)", w=unit(8, 8), x=torch.empty(2, 8))
    assert text_of(lift_tiles(gm)) == "y = mm(x, w)\nreturn (y,)\n"
    assert joined_outputs(gm) == {}
