"""Compute what lies between products with tiles part by part, where nobody needs it as a whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.graph.alias import ALIASES, is_elementwise
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value, positions

from ._pointwise_chains import (
    Chains,
    Span,
    is_row_view,
    is_slice,
    is_sum,
    part_of_row,
    source_of,
    span_of,
    turned,
)

aten = torch.ops.aten


def tile_pointwise(gm: fx.GraphModule) -> fx.GraphModule:
    """Let element-wise operators give the parts that are read of their results, each where it is read first.

        before:  a = mm(x, u_0);  b = mm(x, u_1);  h = cat([a, b], 1);  r = relu(h)
                 p = slice(r, 1, 0, 4);  y = mm(p, v_0);  q = slice(r, 1, 4, 8);  z = addmm(y, q, v_1)
        after:   a = mm(x, u_0);  p = relu(a);  y = mm(p, v_0);  b = mm(x, u_1);  q = relu(b);  z = addmm(y, q, v_1)

    On a joint graph, or one for inference. A result that a product reads as a whole is put together from its parts, where this
    saves what it is made from; else, and where parts overlap, it stays as it is. Sums over all other dimensions, such as a bias's
    gradient, are taken of the parts.
    """
    if not any(node.target is ops.tile for node in gm.graph.nodes):
        return gm
    chains = Chains(gm.graph)
    parts = _Parts(gm.graph, chains)
    for node in chains.readers:
        if is_slice(node):
            node.replace_all_uses_with(parts.cut(node))
        else:
            node.replace_all_uses_with(parts.sum(node) if is_sum(node) else parts.assemble(node))
    if chains.readers:
        gm.graph.eliminate_dead_code()
        _sink(gm.graph, parts.products)
    return gm


class _Parts:
    """The parts of a graph's values, as they are made."""

    def __init__(self, graph: fx.Graph, chains: Chains) -> None:
        self._graph = graph
        self._chains = chains
        self._made: dict[tuple[fx.Node, Span], fx.Node] = {}
        self.products: list[fx.Node] = []
        """What was put together with others, and now is read by itself."""

    def cut(self, cut: fx.Node) -> fx.Node:
        """Return what a slice is of, computed alone, where the slice is."""
        emit, source = NodeBuilder(self._graph, cut), source_of(cut)
        part = self._part(turned(source), span_of(cut), emit)
        return part if turned(source) is source else emit(source.target, part, *source.args[1:], like=source)

    def sum(self, total: fx.Node) -> fx.Node:
        """Return a sum over all but the last dimension, put together from those of the parts, each where the part is."""
        source, emit, sums = source_of(total), NodeBuilder(self._graph, total), []
        for span in sorted(self._chains.spans[source]):
            part = self._part(source, span, emit)
            after = NodeBuilder(self._graph, part, after=True)
            sums.append(after(total.target, part, *total.args[1:], kwargs=total.kwargs, like=total))
        return emit(aten.cat.default, sums, -1)

    def assemble(self, whole: fx.Node) -> fx.Node:
        """Return a value put together from its parts."""
        emit = NodeBuilder(self._graph, whole)
        return emit(aten.cat.default, [self._compute(whole, s, emit) for s in sorted(self._chains.assembled[whole])], -1)

    def _part(self, node: fx.Node, span: Span, emit: NodeBuilder) -> fx.Node:
        if (node, span) not in self._made:
            self._made[node, span] = self._make(node, span, emit)
        return self._made[node, span]

    def _make(self, node: fx.Node, span: Span, emit: NodeBuilder) -> fx.Node:
        if node in self._chains.spans:
            if node.target is aten.cat.default:
                if (product := part_of_row(node, span)) is not None:
                    self.products.append(product)
                    return product
            elif is_elementwise(node) or is_row_view(node):
                return self._compute(node, span, emit)
        return emit(aten.slice.Tensor, node, fake_value(node).dim() - 1, *span, like=node)

    def _compute(self, node: fx.Node, span: Span, emit: NodeBuilder) -> fx.Node:
        if node.target in ALIASES:
            return self._part(source_of(node), span, emit)
        if is_row_view(node):
            sizes = [*node.args[1][:-1], span[1] - span[0]]  # type: ignore[index, misc]
            return emit(node.target, self._part(source_of(node), span, emit), sizes, like=node)
        size = fake_value(node).shape[-1]

        def part(operand: fx.Node) -> fx.Node:
            value = operand.meta["val"]
            whole = not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[-1] != size
            return operand if whole else self._part(operand, span, emit)

        args_, kwargs = fx.map_arg((node.args, node.kwargs), part)
        return emit(node.target, *args_, kwargs=kwargs, like=node)


def _sink(graph: fx.Graph, products: Iterable[fx.Node]) -> None:
    """Move products in front of what reads them first."""
    place = positions(graph)
    for product in products:
        min(product.users, key=place.__getitem__).prepend(product)
