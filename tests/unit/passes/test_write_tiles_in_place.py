from __future__ import annotations

import pytest
import torch
from irtext import each_a_tile, example_of, graph_of, lines_of, text_of, unit
from torch import fx

from zinf_compile.passes.graph.node_facts import mark_region, starts_region
from zinf_compile.passes.tiling.write_tiles_in_place import write_tiles_in_place

INPUTS = {
    **{name: torch.empty(4, 4) for name in ("x", "y", "z")},
    "bias": torch.empty(4),
    "w_tile_0": unit(4, 4),
    "w_tile_1": unit(4, 4),
}


def graph(text: str, *, tiles: bool = True) -> fx.GraphModule:
    gm = graph_of(text, **INPUTS)
    return each_a_tile(gm) if tiles else gm


def after(text: str) -> list[str]:
    gm = write_tiles_in_place(graph(text))
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.empty_strided.default:
            node.kwargs = {}
    renamed = {"whole": "y", "slice_tensor": "a", "slice_tensor_1": "b", "slice_tensor_2": "c", "slice_tensor_3": "d"}
    return lines_of(text_of(gm, **renamed))


def test_docstring_example() -> None:
    before, expected = example_of(write_tiles_in_place)
    assert after("; ".join([*before, "r = relu(y)"])) == [*expected, "r = relu(y)"]


def test_biases_and_sums() -> None:
    text = "a = addmm(bias, x, w_tile_0); b = mm(x, w_tile_0); c = addmm_(b, z, w_tile_1); w = cat([a, c], 1); r = relu(w)"
    assert after(text) == [
        "y = empty_strided([4, 8], [8, 1])",
        "a = slice(y, 1, 0, 4)",
        "addmm_out(a, bias, x, w_tile_0)",
        "b = slice(y, 1, 4, 8)",
        "mm_out(b, x, w_tile_0)",
        "c = slice(y, 1, 4, 8)",
        "c = addmm_(c, z, w_tile_1)",
        "r = relu(y)",
    ]


def test_rows_of_columns() -> None:
    text = "p = mm(x, w_tile_0); q = mm(x, w_tile_1); s = cat([p, q], 1); u = mm(z, w_tile_0); v = mm(z, w_tile_1)"
    assert after(f"{text}; t = cat([u, v], 1); w = cat([s, t]); r = relu(w)")[:4] == [
        "y = empty_strided([8, 8], [8, 1])",
        "a = slice(y, 0, 0, 4)",
        "b = slice(a, 1, 0, 4)",
        "mm_out(b, x, w_tile_0)",
    ]


def test_what_is_made_of_a_product_is_copied_at_once() -> None:
    text = "p = mm(x, w_tile_0); f = relu(p); q = mm(x, w_tile_1); g = relu(q); w = cat([f, g], 1); r = sin(w)"
    assert after(text) == [
        "p = mm(x, w_tile_0)",
        "f = relu(p)",
        "y = empty_strided([4, 8], [8, 1])",
        "a = slice(y, 1, 0, 4)",
        "copy_out(a, f)",
        "q = mm(x, w_tile_1)",
        "g = relu(q)",
        "b = slice(y, 1, 4, 8)",
        "copy_out(b, g)",
        "r = sin(y)",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a = mm(x, z); b = mm(x, y); c = cat([a, b], 1); return (c,)",
        "a = mm(x, w_tile_0); b = mm(x, w_tile_1); c = cat([a, b], 1); d = relu(a); return (c, d)",
        "a = mm(x, w_tile_0); c = cat([a, x], 1); return (c,)",
        "a = mm(x, w_tile_0); c = cat([a, a], 1); d = relu(c); return (d, a)",
        "a = mm(x, w_tile_0); b = sum(a, [0], True); c = cat([b, b], 1); return (c,)",
    ],
    ids=["no tiles", "read besides", "an input", "twice and returned", "no elements of the product"],
)
def test_what_is_no_row_of_products_stays_as_it_is(text: str) -> None:
    assert lines_of(text_of(write_tiles_in_place(graph(text)))) == lines_of(text)


def test_regions_begin_where_they_began() -> None:
    gm = graph("a = mm(x, w_tile_0); b = mm(x, w_tile_1); c = cat([a, b], 1); return (c,)")
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.mm.default:
            mark_region(node)
    write_tiles_in_place(gm)
    assert [node.name for node in gm.graph.nodes if starts_region(node)] == ["whole", "slice_tensor_1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_write_what_others_return(dtype: torch.dtype) -> None:
    ops, (x, w, bias) = torch.ops.zinf_compute, (torch.randn(*size, dtype=dtype) for size in ((33, 40), (40, 24), (24,)))
    whole = torch.full((33, 100), float("nan"), dtype=dtype)
    ops.mm_out(whole[:, :24], x, w)
    ops.addmm_out(whole[:, 24:48], bias, x, w)
    ops.addmm_out(whole[:, 48:72], bias, x, w, beta=0.5, alpha=2)
    ops.copy_out(whole[:, 72:96], x[:, :24])
    expected = [torch.mm(x, w), torch.addmm(bias, x, w), torch.addmm(bias, x, w, beta=0.5, alpha=2), x[:, :24]]
    assert torch.equal(whole[:, :96], torch.cat(expected, 1))
    assert whole[:, 96:].isnan().all()
