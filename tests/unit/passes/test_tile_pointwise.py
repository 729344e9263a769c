from __future__ import annotations

import pytest
import torch
from irtext import copied, cut, example_of, graph_of, lines_of, results, text_of, unit
from torch import nn
from tracing import traced

from zinf_compile.passes.graph.node_facts import fake_value
from zinf_compile.passes.tiling import _pointwise_chains
from zinf_compile.passes.tiling.tile_matmuls import tile_matmuls
from zinf_compile.passes.tiling.tile_pointwise import tile_pointwise

INPUTS = {
    "x": torch.empty(2, 4),
    "z": torch.empty(2, 8),
    "row": torch.empty(8),
    "five": torch.empty(5, 3),
    "column": torch.empty(2, 1),
    "u": unit(8, 4),
    "v": unit(8, 4),
}
TILES = "; ".join(
    f"{name}_{number} = tile({name}, [{4 * number}, 0], [{4 * number + 4}, 4])" for name in ("u", "v") for number in (0, 1)
)
ROW = "a = mm(x, u_0); b = mm(x, u_1); h = cat([a, b], 1)"
READ = "p = slice(r, 1, 0, 4); y = mm(p, v_0); q = slice(r, 1, 4, 8); s = addmm(y, q, v_1)"


def after(text: str, *, tiles: str = TILES) -> list[str]:
    before, gm = graph_of(f"{tiles}; {text}", **INPUTS), graph_of(f"{tiles}; {text}", **INPUTS)
    gm = tile_pointwise(gm)
    gm.graph.lint()
    for computed, expected in zip(results(gm), results(before), strict=True):
        assert torch.equal(computed, expected)
    return [line for line in lines_of(text_of(gm)) if "tile(" not in line]


def test_docstring_example() -> None:
    before, expected = example_of(tile_pointwise)
    gm = tile_pointwise(graph_of("; ".join([TILES, *before, "return (z,)"]), **{n: v for n, v in INPUTS.items() if n != "z"}))
    shown = text_of(gm, relu_default="p", relu_default_1="q")
    assert [line for line in lines_of(shown) if "tile(" not in line] == [*expected, "return (z,)"]


def test_a_chain_of_several_with_others() -> None:
    text = f"{ROW}; c = mul(h, row); d = add(c, column); e = add(d, z); r = mul(e, e); {READ}; return (s,)"
    assert after(text) == [
        "slice_tensor = slice(row, 0, 0, 4)",
        "a = mm(x, u_0)",
        "mul_tensor = mul(a, slice_tensor)",
        "add_tensor = add(mul_tensor, column)",
        "slice_tensor_1 = slice(z, 1, 0, 4)",
        "add_tensor_1 = add(add_tensor, slice_tensor_1)",
        "mul_tensor_1 = mul(add_tensor_1, add_tensor_1)",
        "y = mm(mul_tensor_1, v_0)",
        "slice_tensor_2 = slice(row, 0, 4, 8)",
        "b = mm(x, u_1)",
        "mul_tensor_2 = mul(b, slice_tensor_2)",
        "add_tensor_2 = add(mul_tensor_2, column)",
        "slice_tensor_3 = slice(z, 1, 4, 8)",
        "add_tensor_3 = add(add_tensor_2, slice_tensor_3)",
        "mul_tensor_3 = mul(add_tensor_3, add_tensor_3)",
        "s = addmm(y, mul_tensor_3, v_1)",
        "return (s,)",
    ]


def test_views_transposes_and_sums() -> None:
    text = "n = view(z, [1, 2, 8]); f = relu(n); r = view(f, [2, 8]); t = t(r); p = slice(t, 0, 0, 4); y = mm(p, x)"
    assert after(f"{text}; q = slice(t, 0, 4, 8); s = mm(q, x); m = sum(r, [0], True); return (y, s, m)") == [
        "slice_tensor = slice(z, 1, 0, 4)",
        "view_default = view(slice_tensor, [1, 2, 4])",
        "relu_default = relu(view_default)",
        "view_default_1 = view(relu_default, [2, 4])",
        "sum_dim_int_list = sum(view_default_1, [0], True)",
        "t_default = t(view_default_1)",
        "y = mm(t_default, x)",
        "slice_tensor_1 = slice(z, 1, 4, 8)",
        "view_default_2 = view(slice_tensor_1, [1, 2, 4])",
        "relu_default_1 = relu(view_default_2)",
        "view_default_3 = view(relu_default_1, [2, 4])",
        "sum_dim_int_list_1 = sum(view_default_3, [0], True)",
        "t_default_1 = t(view_default_3)",
        "s = mm(t_default_1, x)",
        "cat_default = cat([sum_dim_int_list, sum_dim_int_list_1], -1)",
        "return (y, s, cat_default)",
    ]


def test_what_a_product_reads_as_a_whole_is_put_together_from_parts() -> None:
    assert after(
        f"{ROW}; f = mul(h, row); r = relu(f); s = mm(r, v_all); return (s,)",
        tiles=f"{TILES}; v_all = tile(v, [0, 0], [8, 4])",
    ) == [
        "slice_tensor = slice(row, 0, 0, 4)",
        "a = mm(x, u_0)",
        "mul_tensor = mul(a, slice_tensor)",
        "relu_default = relu(mul_tensor)",
        "slice_tensor_1 = slice(row, 0, 4, 8)",
        "b = mm(x, u_1)",
        "mul_tensor_1 = mul(b, slice_tensor_1)",
        "relu_default_1 = relu(mul_tensor_1)",
        "cat_default = cat([relu_default, relu_default_1], -1)",
        "s = mm(cat_default, v_all)",
        "return (s,)",
    ]


@pytest.mark.parametrize(
    "text",
    [
        f"{ROW}; r = relu(h); {READ}; return (s, r)",
        f"{ROW}; r = relu(h); {READ}; m = sum(r, [1], True); return (s, m)",
        f"{ROW}; r = relu(h); p = slice(r, 1, 0, 5); q = slice(r, 1, 4, 8); y = mm(p, five); s = mm(q, v_0); return (y, s)",
        f"{ROW}; r = relu(h); p = slice(r, 1, 0, 4); q = slice(r, 1, 4, 8); y = add(p, q); return (y,)",
        f"{ROW}; r = rand_like(h); {READ}; return (s,)",
        f"{ROW}; r = softmax(h, -1); {READ}; return (s,)",
        f"{ROW}; r = relu(h); return (r,)",
        f"{ROW}; f = relu(h); g = sin(h); r = mul(f, z); return (r, g)",
    ],
    ids=[
        "returned",
        "summed along",
        "overlapping",
        "no products",
        "random",
        "rows are one",
        "no product reads it",
        "two results",
    ],
)
def test_what_is_read_otherwise_stays_as_it_is(text: str) -> None:
    text = text.replace("softmax(h, -1)", "_softmax(h, -1, False)")
    gm = tile_pointwise(graph_of(f"{TILES}; {text}", **INPUTS))
    assert [line for line in lines_of(text_of(gm)) if "tile(" not in line] == lines_of(text)


def test_graphs_without_tiles_are_left_alone() -> None:
    text = f"r = relu(z); {READ.replace('v_0', 'u').replace('v_1', 'u')}; return (s,)".replace("r, 1, 4, 8", "r, 1, 0, 4")
    inputs = {**INPUTS, "u": torch.empty(4, 4)}
    assert lines_of(text_of(tile_pointwise(graph_of(text, **inputs)))) == lines_of(text)


class Hidden(nn.Module):
    """Two layers with an activation between them, the second one's weight as linear layers have it or turned."""

    def __init__(self, activation: nn.Module, *, turned: bool) -> None:
        super().__init__()
        self.up, self.activation = nn.Linear(8, 32), activation
        self.down = nn.Parameter(torch.randn(32, 8) if turned else torch.randn(8, 32))
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.up(x))
        return hidden @ self.down if self.turned else hidden @ self.down.t()


def hidden_values(activation: nn.Module, *, turned: bool, kind: str) -> set[str]:
    """Return which values are as large as all tokens' activations, in tiles of 8 of them; and check that they are right."""
    gm = traced(Hidden(activation, turned=turned), torch.randn(2, 3, 8, requires_grad=True))[kind]
    before = copied(gm)
    gm = tile_pointwise(tile_matmuls(cut(gm, 8 * 8 * 4)))
    for computed, expected in zip(results(gm), results(before), strict=True):
        torch.testing.assert_close(computed, expected)
    large = [
        n
        for n in gm.graph.nodes
        if n.op == "call_function" and fake_value(n).shape[-1:] == (32,) and fake_value(n).numel() == 192
    ]
    names = {node.target.name().removeprefix("aten::").split(".")[0] for node in large}
    return {"view" if name == "_unsafe_view" else name for name in names}  # in the place of a view since PyTorch 2.15


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.Sequential(nn.SiLU(), nn.Tanh())], ids=["relu", "gelu", "two"])
@pytest.mark.parametrize("kind", ["inference", "joint"])
def test_weights_cut_along_the_hidden_dimension_run_tile_by_tile_end_to_end(activation: nn.Module, kind: str) -> None:
    assert hidden_values(activation, turned=True, kind=kind) == set()


def test_linear_layers_have_one_activation_and_one_gradient_as_a_whole() -> None:
    assert hidden_values(nn.ReLU(), turned=False, kind="inference") == {"cat", "view"}
    assert hidden_values(nn.GELU(), turned=False, kind="inference") == {"cat", "view"}
    assert hidden_values(nn.ReLU(), turned=False, kind="joint") == {"cat", "view", "mm", "addmm"}
    assert hidden_values(nn.GELU(), turned=False, kind="joint") == {"cat", "view", "gelu", "mm", "addmm"}


def test_many_parts_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pointwise_chains, "MOST_PARTS", 1)
    text = f"{ROW}; r = relu(h); {READ}; return (s,)"
    assert after(text) == lines_of(text)
