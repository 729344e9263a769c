"""Write products with tiles directly into the matrix that they are parts of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from zinf_compile.ir.compute_ops import addmm_out, copy_out, mm_out
from zinf_compile.passes.graph.alias import is_elementwise
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.concat import parts_of_cat
from zinf_compile.passes.graph.node_facts import fake_value, move_region_mark, positions

from ._forms import is_of_tile
from ._pointwise_chains import is_row_view

aten = torch.ops.aten

INTO: Mapping[object, torch._ops.OpOverload] = {aten.mm.default: mm_out, aten.addmm.default: addmm_out}
"""Products, and the operators that write them into a given matrix."""

_SUMS = frozenset({aten.addmm_.default})
"""Operators that add a product to a sum in place."""

Slices = tuple[tuple[int, int, int], ...]
"""Nested slices (dimension, start, end) of the whole, outermost first."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """One part of a concatenation: a value computed from products, or a product and those added to it."""

    slices: Slices
    values: tuple[fx.Node, ...]


def write_tiles_in_place(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace a concatenation of products with tiles by a matrix into which each product writes.

        before:  a = mm(x, w_tile_0);  b = mm(x, w_tile_1);  y = cat([a, b], 1)
        after:   y = empty_strided([4, 8], [8, 1]);  a = slice(y, 1, 0, 4);  mm_out(a, x, w_tile_0)
                 b = slice(y, 1, 4, 8);  mm_out(b, x, w_tile_1)

    Element-wise results of a product are copied as soon as they are computed. At most one part exists besides the whole, and the
    bits are the same. Values of dynamic sizes, and parts with other users, stay as they are.
    """
    place = positions(gm.graph)
    for node in reversed(list(gm.graph.nodes)):  # outer concatenations first
        if node.target is aten.cat.default and node.args and node.users:
            parts = _parts(node, ())
            if parts and all(isinstance(size, int) for size in fake_value(node).shape):
                _write(gm.graph, node, sorted(parts, key=lambda part: place[part.values[0]]))
    return gm


def _parts(whole: fx.Node, slices: Slices) -> list[_Part]:
    """Return the parts of a concatenation; empty unless each one comes from products with tiles and has no other user."""
    value, (dim, concatenated) = fake_value(whole), parts_of_cat(whole)
    found: list[_Part] = []
    for tensor, start, end in concatenated:
        part = fake_value(tensor)
        if list(tensor.users) != [whole] or (part.dtype, part.dim()) != (value.dtype, value.dim()):
            return []
        here = (*slices, (dim, start, end))
        if tensor.target is aten.cat.default and tensor.args:
            inner = _parts(tensor, here)
        else:
            inner = [_Part(here, values)] if (values := _products(tensor) or _made_from_product(tensor)) else []
        if not inner:
            return []
        found += inner
    return found


def _products(total: fx.Node) -> tuple[fx.Node, ...]:
    """Return a product with a tile and the products added to it in place, in order; empty for other values."""
    if total.target in _SUMS:
        before = total.args[0]
        assert isinstance(before, fx.Node)
        first = _products(before) if list(before.users) == [total] else ()
        return (*first, total) if first else ()
    return (total,) if total.target in INTO and any(map(is_of_tile, total.all_input_nodes)) else ()


def _made_from_product(value: fx.Node) -> tuple[fx.Node, ...]:
    """Return the value if element-wise operators compute it from a product with a tile, else empty."""
    stack = [value]
    while stack:
        node = stack.pop()
        if _products(node):
            return (value,)
        if is_elementwise(node) or is_row_view(node):
            stack += node.all_input_nodes
    return ()


def _write(graph: fx.Graph, whole: fx.Node, parts: Sequence[_Part]) -> None:
    """Replace the parts of a concatenation, in the order in which they are computed."""
    value = fake_value(whole)
    memory: fx.Node | None = None
    for part in parts:
        for node in part.values:
            product = node.target in INTO or node.target in _SUMS
            before, emit = node.prev, NodeBuilder(graph, node, after=not product)
            if memory is None:
                options = {"dtype": value.dtype, "device": value.device}
                memory = emit(aten.empty_strided.default, [*value.shape], [*value.stride()], kwargs=options, name="whole")
            piece = memory
            for dim, start, end in part.slices:
                piece = emit(aten.slice.Tensor, piece, dim, start, end)
            if not product:
                emit(copy_out, piece, node)
                continue
            if node.target in INTO:
                emit(INTO[node.target], piece, *node.args, kwargs=node.kwargs)
            else:
                total = node.args[0]
                assert isinstance(total, fx.Node)
                node.args = (piece, *node.args[1:])
                _erase(graph, total)
            move_region_mark(node, before.next)
    assert memory is not None, "a concatenation has parts"
    whole.replace_all_uses_with(memory)
    _erase(graph, whole)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a concatenation without users, and its products."""
    if not node.users and (node.target in INTO or node.target is aten.cat.default):
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for source in inputs:
            if source.target in INTO or source.target is aten.cat.default:
                _erase(graph, source)
