"""Tiles of a gradient, each computed from slices of the whole gradient's inputs. `tile_matmuls` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import fx

from zinf_compile.ir.compute_ops import take_scaled
from zinf_compile.ir.tiling import Box, tile_shape
from zinf_compile.passes.graph.alias import ALIASES, is_elementwise
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.concat import parts_of_cat
from zinf_compile.passes.graph.node_facts import fake_value

from ._forms import integers
from ._uses import slice_of

aten = torch.ops.aten


class GradientTiles:
    """Cuts gradients of one graph into tiles. The whole gradient stays in the graph; without other users it is dead code."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._cut: dict[tuple[fx.Node, Box], fx.Node] = {}
        self._reasons: dict[fx.Node, str] = {}

    def cut(self, node: fx.Node, boxes: Sequence[Box]) -> list[fx.Node] | str:
        """Return the boxes of a gradient, or the reason why it must be computed as a whole.

        g = t(mm(t(d), x))   with row tiles:  t(mm(slice(t(d), 0, 0, r), x)) ..
        """
        reason = self._reason_for_whole(node)
        return reason or [self._box(node, box) for box in boxes]

    def _reason_for_whole(self, node: fx.Node) -> str:
        """Return why a gradient must exist as a whole, empty if it needn't. Decided before the first cut."""
        if node not in self._reasons:
            self._reasons[node] = self._find_reason(node)
        return self._reasons[node]

    def _find_reason(self, node: fx.Node) -> str:
        if node.op != "call_function":
            return "its gradient is an input"
        if len(node.users) > 1:
            return f"its gradient, {node.name}, is used more than once"
        match node.target:
            case aten.t.default | aten.permute.default | aten.transpose.int:
                return self._reason_for_whole(_input(node, 0))
            case aten.embedding_dense_backward.default if len(node.args) > 4 and node.args[4]:
                return "an embedding's gradient is scaled by frequency"
            case aten.select_backward.default if not all(isinstance(value, int) for value in node.args[2:4]):
                return "its gradient is that of an index known at run time only"
            case aten.mm.default | aten.bmm.default | aten.embedding_dense_backward.default | aten.select_backward.default:
                return ""
            case _ if _is_elementwise(node):
                alike = [n for n in node.all_input_nodes if _is_like(n, fake_value(node))]
                reasons = [self._reason_for_whole(n) for n in alike]
                return "" if not all(reasons) else reasons[0] if reasons else f"its gradient is made by {node.name}"
            case aten.cat.default:
                return ""
        return f"its gradient is made by {node.name}"

    def _box(self, node: fx.Node, box: Box) -> fx.Node:
        if (node, box) not in self._cut:
            self._cut[node, box] = self._compute(node, box)
        return self._cut[node, box]

    def _compute(self, node: fx.Node, box: Box) -> fx.Node:
        emit = NodeBuilder(self._graph, node)
        if not self._reason_for_whole(node):
            match node.target:
                case aten.t.default:
                    return emit(aten.t.default, self._box(_input(node, 0), box[::-1]))
                case aten.permute.default | aten.transpose.int:
                    order = _order(node)
                    inner = tuple(box[order.index(dim)] for dim in range(len(order)))
                    return emit(aten.permute.default, self._box(_input(node, 0), inner), order)
                case aten.mm.default:
                    a, b = _input(node, 0), _input(node, 1)
                    return emit(aten.mm.default, slice_of(a, 0, box[0], emit), slice_of(b, 1, box[1], emit))
                case aten.bmm.default:
                    a, b = (slice_of(_input(node, position), 0, box[0], emit) for position in (0, 1))
                    return emit(aten.bmm.default, slice_of(a, 1, box[1], emit), slice_of(b, 2, box[2], emit))
                case aten.embedding_dense_backward.default:
                    return _embedding(node, box, emit)
                case aten.select_backward.default:
                    return _select(node, box, emit)
                case aten.cat.default if (part := _part_of_cat(node, box)) is not None:
                    return part
                case _ if _is_elementwise(node):
                    return emit(node.target, *fx.map_arg(node.args, partial(self._operand, node, box, emit)), kwargs=node.kwargs)
        result, emit = node, NodeBuilder(self._graph, node, after=True)
        for dim, span in enumerate(box):
            result = slice_of(result, dim, span, emit)
        return result

    def _operand(self, node: fx.Node, box: Box, emit: NodeBuilder, operand: fx.Node) -> fx.Node:
        """Return the part of an operand, which may be broadcast, that a box of an element-wise result reads."""
        value = operand.meta["val"]
        if not isinstance(value, torch.Tensor):
            return operand
        if _is_like(operand, fake_value(node)):
            return self._box(operand, box)
        for dim, span in enumerate(box[len(box) - value.dim() :]):
            if value.shape[dim] != 1:
                operand = slice_of(operand, dim, span, emit)
        return operand


def _is_elementwise(node: fx.Node) -> bool:
    return is_elementwise(node) or node.target in ALIASES or node.target is take_scaled


def _is_like(node: fx.Node, whole: torch.Tensor) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.shape == whole.shape


def _embedding(node: fx.Node, box: Box, emit: NodeBuilder) -> fx.Node:
    """Compute a box of an embedding's gradient. Indices of other rows accumulate in an extra row, which is sliced off."""
    grad, indices, _, padding = node.args[:4]
    (start, end), columns = box
    assert isinstance(grad, fx.Node)
    own = slice_of(grad, fake_value(grad).dim() - 1, columns, emit)
    rows = end - start
    local = emit(aten.sub.Tensor, indices, start) if start else indices
    inside = emit(aten.logical_and.default, emit(aten.ge.Scalar, indices, start), emit(aten.lt.Scalar, indices, end))
    local = emit(aten.where.ScalarOther, inside, local, rows)
    if isinstance(padding, int) and start <= padding < end:
        local = emit(aten.where.ScalarSelf, emit(aten.eq.Scalar, indices, padding), rows, local)
    whole = emit(aten.embedding_dense_backward.default, own, local, rows + 1, rows, False)
    return emit(aten.slice.Tensor, whole, 0, 0, rows)


def _select(node: fx.Node, box: Box, emit: NodeBuilder) -> fx.Node:
    """Compute a box of a select's gradient, which is zero but at one index."""
    grad, (dim, index) = _input(node, 0), integers(node.args[2:4])
    shape = fake_value(node).shape
    dim, index = dim % len(shape), index % shape[dim]
    (start, end), sizes = box[dim], list(tile_shape(box))
    if not start <= index < end:
        value = fake_value(node)
        return emit(aten.full.default, sizes, 0, dtype=value.dtype, device=value.device)
    for position, span in enumerate(box[:dim] + box[dim + 1 :]):
        grad = slice_of(grad, position, span, emit)
    return emit(aten.select_backward.default, grad, sizes, dim, index - start)


def _part_of_cat(node: fx.Node, box: Box) -> fx.Node | None:
    """Return the concatenated value whose box in the result is `box`, None if there is none."""
    shape, (dim, parts) = fake_value(node).shape, parts_of_cat(node)
    for part, start, end in parts:
        here = tuple((start, end) if d == dim else (0, length) for d, length in enumerate(shape))
        if here == box and tuple(fake_value(part).shape) == tile_shape(box):
            return part
    return None


def _order(node: fx.Node) -> list[int]:
    """Return a permutation: for each dimension of the result, that of the input."""
    rank = fake_value(node).dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in integers(node.args[1])]
    order, (one, other) = list(range(rank)), integers(node.args[1:3])
    order[one], order[other] = order[other], order[one]
    return order


def _input(node: fx.Node, position: int) -> fx.Node:
    value = node.args[position]
    assert isinstance(value, fx.Node)
    return value
