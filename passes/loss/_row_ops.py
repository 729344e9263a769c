"""Row operators: those between a head's product and its loss that keep each token's row intact, and their replay on other rows.

Other files of this folder find chains of them in a graph and repeat them on hidden states and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zinf_compile.passes.graph.alias import ALIASES, MOVES, VIEWS, is_cast
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value

aten = torch.ops.aten

COPIES = frozenset({aten.clone.default, aten.contiguous.default})
SLICES = frozenset({aten.slice.Tensor, aten.slice_backward.default})
SELECTS = frozenset({aten.select.int, aten.select_backward.default})
RESIZES = frozenset({aten.unsqueeze.default, aten.squeeze.dim})
ROW_OPS = VIEWS | ALIASES | COPIES | SLICES | SELECTS | MOVES | RESIZES
"""Operators that select or move rows (tokens). The numbers of a row stay adjacent, in order."""

Steps = list[tuple[fx.Node, int]]
"""Operators in order, each with the dimension of the classes in its result."""

PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
SCALAR_OPS = PRODUCTS | {aten.div.Tensor, aten.div.Scalar}
"""Element-wise operators with a number as second argument."""


class UnknownLogitsError(Exception):
    """A loss doesn't match; `reason` says why, `node` is the operator that doesn't match."""

    def __init__(self, reason: str, node: fx.Node) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


def input_of(node: fx.Node) -> fx.Node:
    """Return an operator's first argument, the operator itself if that isn't a node."""
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) else node


def is_pointwise(node: fx.Node) -> bool:
    """Return whether the node is an element-wise operator of heads: cast, product with a number, tanh or its backward."""
    if is_cast(node):
        return len(node.all_input_nodes) == 1
    if node.target in SCALAR_OPS:
        return isinstance(node.args[0], fx.Node) and isinstance(node.args[1], (int, float))
    return node.target in (aten.tanh.default, aten.tanh_backward.default)


def is_class_sum(node: fx.Node) -> bool:
    """Return whether the node adds a value of fewer dimensions to its first input, such as one number per class."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    first, second = (fake_value(source) for source in node.all_input_nodes)
    return node.args[0] is node.all_input_nodes[0] and second.dim() <= first.dim() and second.dtype == first.dtype


def axis_after(node: fx.Node, axis: int) -> int:
    """Return the dimension of the classes in a row operator's result, given theirs in its input; raise if it splits rows."""
    source = input_of(node)
    before, after = fake_value(source).shape, fake_value(node).shape
    if node.target in VIEWS:
        for place, size in enumerate(after):
            if size == before[axis] and math.prod(after[:place]) == math.prod(before[:axis]):
                return place
        raise UnknownLogitsError("classes and tokens are mixed", node)
    if node.target is aten.t.default:
        return 1 - axis
    if node.target is aten.transpose.int:
        one, other = (int(d) % len(before) for d in node.args[1:3])  # type: ignore[arg-type]
        return {one: other, other: one}.get(axis, axis)
    if node.target is aten.permute.default:
        return [int(d) % len(before) for d in node.args[1]].index(axis)  # type: ignore[arg-type,union-attr]
    if node.target is aten.select_backward.default:
        place = int(node.args[2]) % len(after)  # type: ignore[arg-type]
        return axis + (place <= axis)
    if node.target is aten.slice_backward.default:
        place = int(node.args[2]) % len(after)  # type: ignore[arg-type]
    elif node.target in SLICES | SELECTS | RESIZES:
        rank = len(after) if node.target is aten.unsqueeze.default else len(before)
        place = int(node.args[1]) % rank if len(node.args) > 1 else 0  # type: ignore[arg-type]
    else:
        return axis
    if node.target is aten.unsqueeze.default:
        return axis + (place <= axis)
    if place == axis:
        raise UnknownLogitsError("a part of the classes is used", node)
    if node.target is aten.squeeze.dim and before[place] != 1:
        return axis
    return axis - (place < axis) if node.target in (aten.select.int, aten.squeeze.dim) else axis


def replay(insert: NodeBuilder, steps: Steps, source: fx.Node, width: int) -> fx.Node:
    """Repeat row operators on `source`, whose rows have `width` numbers in place of the classes."""
    current = source
    for node, axis in steps:
        if node.target in VIEWS:
            current = insert.view(current, _sized(fake_value(node).shape, axis, width))
        elif node.target in (aten.slice_backward.default, aten.select_backward.default):
            sizes = _sized(fake_value(node).shape, axis, width)
            current = insert(node.target, current, sizes, *node.args[2:])
        elif node.target not in ALIASES:
            current = insert(node.target, current, *node.args[1:], **node.kwargs)  # type: ignore[arg-type]
    return current


def rows_last(insert: NodeBuilder, source: fx.Node, axis: int) -> fx.Node:
    """Return the value as a matrix of one row per token; `axis` is the dimension that isn't tokens."""
    shape = fake_value(source).shape
    rank = len(shape)
    if axis != rank - 1:
        source = insert(aten.permute.default, source, [*(d for d in range(rank) if d != axis), axis])
    return source if rank == 2 and axis == 1 else insert.view(source, [math.prod(shape) // max(1, shape[axis]), shape[axis]])


def rows_back(insert: NodeBuilder, rows: fx.Node, shape: Sequence[int], axis: int) -> fx.Node:
    """Invert `rows_last`: return the rows in `shape`, whose `axis` isn't tokens."""
    rank, width = len(shape), fake_value(rows).shape[1]
    if rank == 2 and axis == 1:
        return rows
    others = [d for d in range(rank) if d != axis]
    moved = insert.view(rows, [*(shape[d] for d in others), width])
    return moved if axis == rank - 1 else insert(aten.permute.default, moved, [[*others, axis].index(d) for d in range(rank)])


def _sized(shape: Sequence[Any], axis: int, width: int) -> list[Any]:
    return [width if place == axis else size for place, size in enumerate(shape)]
