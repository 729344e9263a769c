"""Write what the tiles of a matrix give where it belongs in the whole."""

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
"""The operators that write what others return."""

_GROWN = frozenset({aten.addmm_.default})
"""Adds a product to a sum in place."""

Place = tuple[tuple[int, int, int], ...]
"""A part of a whole: (dimension, start, end), each of what those before leave."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a concatenation puts in one place: a value made from products, or a product and those that are added to it."""

    place: Place
    values: tuple[fx.Node, ...]


def write_tiles_in_place(gm: fx.GraphModule) -> fx.GraphModule:
    """Let products with tiles write into the matrix that is put together from them, in place of being copied there later.

        before:  a = mm(x, w_tile_0);  b = mm(x, w_tile_1);  y = cat([a, b], 1)
        after:   y = empty_strided([4, 8], [8, 1]);  a = slice(y, 1, 0, 4);  mm_out(a, x, w_tile_0)
                 b = slice(y, 1, 4, 8);  mm_out(b, x, w_tile_1)

    What element-wise operators make of a product is copied as soon as it is there. So no more than one part is in memory besides
    the whole, and the bits are the same. Left alone are sizes known at run time only, and parts that others read.
    """
    place = positions(gm.graph)
    for node in reversed(list(gm.graph.nodes)):  # what is put together from what was put together, first
        if node.target is aten.cat.default and node.args and node.users:
            parts = _parts(node, ())
            if parts and all(isinstance(size, int) for size in fake_value(node).shape):
                _write(gm.graph, node, sorted(parts, key=lambda part: place[part.values[0]]))
    return gm


def _parts(whole: fx.Node, place: Place) -> list[_Part]:
    """Return what a concatenation consists of; nothing where that isn't made from products with tiles for it alone."""
    value, (dim, stretches) = fake_value(whole), parts_of_cat(whole)
    found: list[_Part] = []
    for tensor, start, end in stretches:
        part = fake_value(tensor)
        if list(tensor.users) != [whole] or (part.dtype, part.dim()) != (value.dtype, value.dim()):
            return []
        here = (*place, (dim, start, end))
        if tensor.target is aten.cat.default and tensor.args:
            inner = _parts(tensor, here)
        else:
            inner = [_Part(here, values)] if (values := _products(tensor) or _made_from_product(tensor)) else []
        if not inner:
            return []
        found += inner
    return found


def _products(total: fx.Node) -> tuple[fx.Node, ...]:
    """Return the product with a tile that a value is, and those that were added to it in place; nothing for other values."""
    if total.target in _GROWN:
        before = total.args[0]
        assert isinstance(before, fx.Node)
        first = _products(before) if list(before.users) == [total] else ()
        return (*first, total) if first else ()
    return (total,) if total.target in INTO and any(map(is_of_tile, total.all_input_nodes)) else ()


def _made_from_product(value: fx.Node) -> tuple[fx.Node, ...]:
    """Return the value, where element-wise operators make it of a product with a tile."""
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
            product = node.target in INTO or node.target in _GROWN
            before, emit = node.prev, NodeBuilder(graph, node, after=not product)
            if memory is None:
                options = {"dtype": value.dtype, "device": value.device}
                memory = emit(aten.empty_strided.default, [*value.shape], [*value.stride()], kwargs=options, name="whole")
            piece = memory
            for dim, start, end in part.place:
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
    """Remove a concatenation and the products that it was made from, now that others have taken their places."""
    if not node.users and (node.target in INTO or node.target is aten.cat.default):
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for source in inputs:
            if source.target in INTO or source.target is aten.cat.default:
                _erase(graph, source)
