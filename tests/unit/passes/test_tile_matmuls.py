from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from irtext import copied, cut, results, text_of
from torch import fx, nn
from torch.nn import functional as F
from tracing import joint_graph, traced

from zinf_compile.passes import graph_passes, run_passes, verify
from zinf_compile.passes.graph.node_facts import skipped_notes
from zinf_compile.passes.tiling.tile_matmuls import tile_matmuls


class With(nn.Module):
    """Calls `function(w, x)` with a parameter."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.w, x)


def tiled(function: Callable[..., Any], *shape: int, x: torch.Tensor, rows: int = 2, kind: str = "joint") -> fx.GraphModule:
    graph = traced(With(function, *shape), x)[kind]
    return tile_matmuls(cut(graph, rows * 4 * torch.Size(shape[1:]).numel()))


def test_a_linear_layer() -> None:
    gm = tiled(lambda w, x: F.linear(x, w), 4, 3, x=torch.randn(5, 3, requires_grad=True))
    assert text_of(gm, primals_2="x", tangents_1="dy").splitlines() == [
        "primals_1_tile = tile(w, [0, 0], [2, 3])",
        "t_default = t(primals_1_tile)",
        "mm_default = mm(x, t_default)",
        "primals_1_tile_1 = tile(w, [2, 0], [4, 3])",
        "t_default_1 = t(primals_1_tile_1)",
        "mm_default_1 = mm(x, t_default_1)",
        "cat_default = cat([mm_default, mm_default_1], 1)",
        "t_1 = t(dy)",
        "slice_tensor_2 = slice(t_1, 0, 0, 2)",
        "mm_default_3 = mm(slice_tensor_2, x)",
        "slice_tensor_3 = slice(t_1, 0, 2, 4)",
        "mm_default_4 = mm(slice_tensor_3, x)",
        "t_default_6 = t(mm_default_3)",
        "t_default_8 = t(mm_default_4)",
        "primals_1_tile_2 = tile(w, [0, 0], [2, 3])",
        "t_default_2 = t(primals_1_tile_2)",
        "t_default_3 = t(t_default_2)",
        "slice_tensor = slice(dy, 1, 0, 2)",
        "mm_default_2 = mm(slice_tensor, t_default_3)",
        "primals_1_tile_3 = tile(w, [2, 0], [4, 3])",
        "t_default_4 = t(primals_1_tile_3)",
        "t_default_5 = t(t_default_4)",
        "slice_tensor_1 = slice(dy, 1, 2, 4)",
        "addmm_default = addmm(mm_default_2, slice_tensor_1, t_default_5)",
        "t_default_7 = t(t_default_6)",
        "t_default_9 = t(t_default_8)",
        "gradient = join_tiles([t_default_7, t_default_9], w)",
        "return [cat_default, gradient, addmm_default]",
    ]


USES: dict[str, tuple[Callable[..., Any], tuple[int, ...], torch.Tensor]] = {
    "linear": (lambda w, x: F.linear(x, w), (6, 4), torch.randn(5, 4)),
    "the other way": (lambda w, x: x @ w, (6, 4), torch.randn(5, 6)),
    "on the left": (lambda w, x: w @ x, (6, 4), torch.randn(4, 5)),
    "transposed on the left": (lambda w, x: w.t() @ x, (6, 4), torch.randn(6, 5)),
    "a batch": (lambda w, x: torch.bmm(x, w), (6, 4, 3), torch.randn(6, 2, 4)),
    "a batch on the left": (lambda w, x: torch.bmm(w.transpose(1, 2), x), (6, 4, 3), torch.randn(6, 4, 2)),
    "one expert": (lambda w, x: x @ w[3] + x @ w[1], (6, 4, 3), torch.randn(5, 4)),
    "with a bias": (lambda w, x: torch.addmm(x[0, 0], x, w, beta=0.5, alpha=2.0), (6, 4), torch.randn(5, 6)),
    "in another type": (lambda w, x: x.bfloat16() @ w.bfloat16(), (6, 4), torch.randn(5, 6)),
    "in three dimensions": (lambda w, x: F.linear(x, w), (6, 4), torch.randn(2, 5, 4)),
}


@functools.cache
def graphs_of(use: str) -> dict[str, fx.GraphModule]:
    """Return the graphs of one of `USES`; tests work on copies."""
    function, shape, x = USES[use]
    return traced(With(function, *shape), x)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("use", USES)
def test_same_numbers(use: str, rows: int) -> None:
    _, shape, _ = USES[use]
    graphs = graphs_of(use)
    for kind in ("joint", "inference"):
        gm = copied(graphs[kind])
        before = results(copied(gm))
        after = tile_matmuls(cut(gm, rows * 4 * torch.Size(shape[1:]).numel()))
        assert not skipped_notes(after)
        assert "tile(" in text_of(after)
        for one, other in zip(before, results(after), strict=True):
            if isinstance(one, torch.Tensor):
                # bf16: up to 6 partial sums below 6, each rounded to 2**-9 of itself
                torch.testing.assert_close(other, one, rtol=1e-5, atol=6 * 6 * 2**-9 if use == "in another type" else 1e-5)


@pytest.mark.parametrize(("tile_bytes", "rows", "looked_up", "parts"), [(2 * 16, 1, 0, 3), (8, 0, 12, 12)])
def test_an_embedding_tied_to_the_head(tile_bytes: int, rows: int, looked_up: int, parts: int) -> None:
    words = torch.tensor([[1, 5, 5], [0, 4, 3]])
    graphs = traced(With(lambda w, i: F.linear(F.embedding(i, w, padding_idx=3), w), 6, 4), words)
    before = results(copied(graphs["joint"]))
    after = tile_matmuls(cut(graphs["joint"], tile_bytes))
    assert not skipped_notes(after)
    text = text_of(after)
    assert text.count("gather_rows(w, ") == rows
    assert text.count(" embedding(") == looked_up
    assert text.count("embedding_dense_backward(") == parts
    for one, other in zip(before, results(after), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one)


def test_rows_of_an_embedding() -> None:
    gm = tiled(lambda w, x: F.embedding(x, w.bfloat16()), 6, 4, x=torch.tensor([5, 0]), kind="inference")
    assert text_of(gm).splitlines() == [
        "rows = gather_rows(w, x)",
        "_to_copy_default = _to_copy(rows, dtype=torch.bfloat16)",
        "return (_to_copy_default,)",
    ]


WHOLE = {
    "element by element": (lambda w, x: x * w.sum(), "takes it as a whole"),
    "added up": (lambda w, x: x + w.mean(0), "mean takes it as a whole"),
    "in another shape": (lambda w, x: x[0, :3] @ w.reshape(3, 8), "view takes it as a whole"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_no_product_stays_and_says_why(case: str) -> None:
    function, reason = WHOLE[case]
    graph = joint_graph(With(function, 6, 4), torch.randn(5, 4))
    before = text_of(copied(graph))
    after = tile_matmuls(cut(graph, 2 * 16))
    assert "tile(" not in text_of(after)
    assert text_of(after) == before
    assert reason in str(skipped_notes(after))


def test_a_product_with_itself() -> None:
    graph = joint_graph(With(lambda w, x: (w.t() @ w).sum() * x, 6, 4), torch.randn(5, 4))
    before = results(copied(graph))
    after = tile_matmuls(cut(graph, 2 * 16))
    assert "mm(t, w)" in text_of(after)
    assert "takes it more than once, or with another" in str(skipped_notes(after))
    for one, other in zip(before, results(after), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_parameters_that_are_not_cut_are_left_alone() -> None:
    graph = joint_graph(With(lambda w, x: x @ w, 6, 4), torch.randn(5, 6))
    before = text_of(copied(graph))
    assert text_of(tile_matmuls(cut(graph, 6 * 16))) == before


@pytest.mark.parametrize("use", USES)
def test_the_schedule_is_legal_after_each_pass(use: str) -> None:
    _, shape, _ = USES[use]
    graph = cut(copied(graphs_of(use)["inference"]), 2 * 4 * torch.Size(shape[1:]).numel())
    run_passes(graph, (tile_matmuls, *graph_passes(bucket_bytes=64)), verify_each=True)
    verify(graph)
