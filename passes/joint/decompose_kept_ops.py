"""Decompose the operators that were kept for `chunk_loss`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten

WHOLE = frozenset(
    {
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.nll_loss_forward.default,
        aten.nll_loss_backward.default,
        aten.nll_loss2d_forward.default,
        aten.nll_loss2d_backward.default,
        aten.tanh_backward.default,
        aten.slice_backward.default,
        aten.select_backward.default,
    }
)
"""Operators that `chunk_loss` reads."""


def decompose_kept_ops(gm: fx.GraphModule, *, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
    """Replace each operator in `WHOLE` by its decomposition in `table`, if it has one.

        before:  l = tanh_backward(g, y);  return (l,)
        after:   mul = mul(y, y);  sub = sub(1, mul);  mul_1 = mul(g, sub);  return (mul_1,)

    AOTAutograd decomposes the others while it traces.
    """
    parts: list[fx.Node] = []
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in WHOLE and node.target in table:
            parts += _decompose(gm.graph, node, table)
    for part in reversed(parts):
        if not part.users:  # computes an unused result
            gm.graph.erase_node(part)
    return gm


def _decompose(graph: fx.Graph, node: fx.Node, table: Mapping[Any, Callable[..., Any]]) -> list[fx.Node]:
    sources = node.all_input_nodes
    target: Callable[..., Any] = node.target  # type: ignore[assignment]

    def call(*values: Any) -> Any:
        known = dict(zip(sources, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        return target(*args, **kwargs)

    values = [source.meta["val"] for source in sources]
    with _fake_mode(values):  # constants of a decomposition must be fake too
        traced = make_fx(call, decomposition_table=dict(table))(*values)
    known: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), sources, strict=True))
    parts = [part for part in traced.graph.nodes if part.op not in ("placeholder", "output")]
    for part in parts:
        with graph.inserting_before(node):
            known[part] = graph.node_copy(part, known.__getitem__)
        for key in ("partitioner_tag", "recompute", "ac_graph_id", "stack_trace"):
            if key in node.meta:
                known[part].meta[key] = node.meta[key]
    (result,) = traced.graph.output_node().args
    _replace_uses(graph, node, fx.map_arg(result, known.__getitem__))
    return [known[part] for part in parts]


def _fake_mode(values: Sequence[object]) -> AbstractContextManager[Any]:
    modes = (getattr(value, "fake_mode", None) for value in values)
    mode: AbstractContextManager[Any] | None = next((mode for mode in modes if mode is not None), None)
    return mode or contextlib.nullcontext()


def _replace_uses(graph: fx.Graph, node: fx.Node, result: Any) -> None:
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # getitem
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
