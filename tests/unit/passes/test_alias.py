from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from irtext import graph_of, unit
from torch.fx.experimental.proxy_tensor import make_fx

from zinf_compile.passes.graph.alias import alias_closure, derived_from, is_elementwise

aten = torch.ops.aten

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "t": aten.t,
    "view": lambda x: aten.view(x, [16]),
    "_unsafe_view": lambda x: aten._unsafe_view(x, [16]),
    "as_strided": lambda x: aten.as_strided(x, [2], [3]),
    "alias": aten.alias,
    "detach": aten.detach,
    "expand": lambda x: aten.expand(x, [2, 4, 4]),
    "select": lambda x: aten.select(x, 0, 1),
    "slice": lambda x: aten.slice(x, 0, 1, 3, 2),
    "split": lambda x: aten.split(x, 2),
    "split_with_sizes": lambda x: aten.split_with_sizes(x, [1, 3]),
    "unsafe_split": lambda x: aten.unsafe_split(x, 2),
    "unsafe_split_with_sizes": lambda x: aten.unsafe_split_with_sizes(x, [1, 3]),
    "unbind": aten.unbind,
    "lift": aten.lift,
    "diagonal": aten.diagonal,
    "view_dtype": lambda x: aten.view(x, torch.int32),
    "_reshape_alias": lambda x: aten._reshape_alias(x, [16], [1]),
    "clone": aten.clone,
    "_to_copy": lambda x: aten._to_copy(x, dtype=torch.float32),
    "convert_element_type": lambda x: torch.ops.prims.convert_element_type(x, torch.float32),
    "native_dropout": lambda x: aten.native_dropout(x, 0.0, False),
    "cat": lambda x: aten.cat([x]),
    "constant_pad_nd": lambda x: aten.constant_pad_nd(x, [0, 0]),
    "repeat": lambda x: aten.repeat(x, [1, 1]),
    "sum": lambda x: aten.sum(x.view(1, 4, 4), [0]),
    "slice_backward": lambda x: aten.slice_backward(x, [4, 4], 0, 0, 4, 1),
    "_adaptive_avg_pool2d": lambda x: aten._adaptive_avg_pool2d(x.view(1, 1, 4, 4), [4, 4]),
    "upsample_nearest2d": lambda x: aten.upsample_nearest2d(x.view(1, 1, 4, 4), [4, 4]),
    "max_pool2d": lambda x: aten.max_pool2d_with_indices(x.view(1, 1, 4, 4), [1, 1]),
    "index_put": lambda x: aten.index_put(x, [torch.tensor([0])], torch.zeros(4)),
    "round": aten.round,
    "all_gather": torch.ops.zinf.all_gather,
    "wait": torch.ops.zinf.wait,
}


@pytest.mark.parametrize("name", CALLS)
def test_values_that_share_memory_when_run_are_known_to(name: str) -> None:
    x = torch.randn(4, 4)
    results = CALLS[name](x)
    shares = any(
        isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        for r in (results if isinstance(results, (tuple, list)) else (results,))
    )
    gm = make_fx(CALLS[name])(x)
    source = next(n for n in gm.graph.nodes if n.op == "placeholder")
    made = [n for n in gm.graph.nodes if n.op == "call_function"]
    reaches = any(user.op == "output" for node in alias_closure(source) for user in node.users)
    assert made, "nothing was traced"
    assert reaches == shares


def closure_of(text: str, name: str = "w") -> set[str]:
    nodes = {n.name: n for n in graph_of(text, x=torch.empty(4, 4), w=unit(4, 4)).graph.nodes}
    return {n.name for n in alias_closure(nodes[name])}


def test_aliases_are_followed_through_parts_and_views_and_end_at_copies() -> None:
    text = "s = split(w, 2); p = s[0]; q = view(p, [8]); c = clone(q); d = t(c); a = mm(w, x)"
    assert closure_of(text) == {"w", "s", "p", "q"}


def test_the_target_of_an_in_place_operator_is_its_result() -> None:
    assert closure_of("v = view(w, [4, 4]); c = copy_(v, x); a = relu(c)") == {"w", "v", "c"}
    assert closure_of("c = copy_(x, w); a = relu(c)") == {"w"}, "what is copied from isn't shared"


def test_derived_values_are_views_and_casts_alone() -> None:
    text = (
        "t = t(w); c = _to_copy(t, dtype=torch.bfloat16); s = split(c, 2); p = s[1]; k = clone(p); v = t(k); "
        "a = mul(w, w); n = sym_size(w, 0)"
    )
    graph = graph_of(text, w=unit(4, 4)).graph
    weight = next(iter(graph.nodes))
    assert {n.name for n in derived_from([weight])} == {"t", "c", "s", "p"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.mul.Tensor, True),
        (aten.gelu.default, True),
        (aten._to_copy.default, True),
        (aten.mul_.Tensor, False),  # changes its input
        (aten.mul.out, False),
        (aten.bernoulli.default, False),  # draws
        (aten.mm.default, False),
        (operator.getitem, False),
    ],
    ids=str,
)
def test_elementwise_is_pointwise_without_changes_and_draws(target: Callable[..., Any], expected: bool) -> None:
    """Read from schemas where tags differ between versions: PyTorch 2.11 has no tag for operators that change their input."""
    graph = torch.fx.Graph()
    assert is_elementwise(graph.call_function(target, (graph.placeholder("x"),))) is expected
