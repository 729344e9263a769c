"""Compute element-wise operators between products with tiles in parts, so that their results never exist as a whole."""

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
    untransposed,
)

aten = torch.ops.aten


def tile_pointwise(gm: fx.GraphModule) -> fx.GraphModule:
    """Compute element-wise results in the parts that are read, each in front of its first reader.

        before:  a = mm(x, u_0);  b = mm(x, u_1);  h = cat([a, b], 1);  r = relu(h)
                 p = slice(r, 1, 0, 4);  y = mm(p, v_0);  q = slice(r, 1, 4, 8);  z = addmm(y, q, v_1)
        after:   a = mm(x, u_0);  p = relu(a);  y = mm(p, v_0);  b = mm(x, u_1);  q = relu(b);  z = addmm(y, q, v_1)

    Runs on a joint graph or an inference graph. A result that a product reads as a whole is concatenated from its parts if that
    makes its inputs unnecessary as wholes. Otherwise, and where parts overlap, it stays as it is. Sums over all other dimensions,
    such as a bias's gradient, are computed from the parts.
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
    """Parts of a graph's values, each computed once."""

    def __init__(self, graph: fx.Graph, chains: Chains) -> None:
        self._graph = graph
        self._chains = chains
        self._made: dict[tuple[fx.Node, Span], fx.Node] = {}
        self.products: list[fx.Node] = []
        """Concatenated products that are now read directly."""

    def cut(self, cut: fx.Node) -> fx.Node:
        """Return the part that a slice reads, computed in its place."""
        emit, source = NodeBuilder(self._graph, cut), source_of(cut)
        part = self._part(untransposed(source), span_of(cut), emit)
        return part if untransposed(source) is source else emit(source.target, part, *source.args[1:], like=source)

    def sum(self, total: fx.Node) -> fx.Node:
        """Return a sum over all but the last dimension, concatenated from the sums of the parts, each right after its part."""
        source, emit, sums = source_of(total), NodeBuilder(self._graph, total), []
        for span in sorted(self._chains.spans[source]):
            part = self._part(source, span, emit)
            after = NodeBuilder(self._graph, part, after=True)
            sums.append(after(total.target, part, *total.args[1:], kwargs=total.kwargs, like=total))
        return emit(aten.cat.default, sums, -1)

    def assemble(self, whole: fx.Node) -> fx.Node:
        """Return a value concatenated from its parts."""
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
    """Move products in front of their first readers."""
    place = positions(graph)
    for product in products:
        min(product.users, key=place.__getitem__).prepend(product)
