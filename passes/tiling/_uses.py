"""Rules for uses of a tiled parameter: matrix products and embeddings, computed from its tiles. `tile_matmuls` calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.row_rounds import rounds_of_rows
from zinf_compile.ir.tiling import Box
from zinf_compile.passes.graph.alias import ALIASES, is_cast
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value

from ._forms import Form

aten = torch.ops.aten

Span = tuple[int, int]


def tile_use(node: fx.Node, form: Form, position: int, emit: NodeBuilder) -> fx.Node | str:
    """Compute a node from the tiles of its argument at `position`, or return the reason why that isn't possible."""
    rule = _RULES.get(node.target)
    if rule is None:
        name = getattr(node.target, "_schema", None)
        return f"{name.name.split('::')[-1] if name is not None else node.target} takes it as a whole"
    return rule(node, form, position, emit)


def slice_of(value: fx.Node, dim: int, span: Span, emit: NodeBuilder) -> fx.Node:
    """Slice a dimension; return the value itself if the span is the whole dimension."""
    if (0, fake_value(value).shape[dim]) == span:
        return value
    return emit(aten.slice.Tensor, value, dim, *span)


def _matmul(node: fx.Node, form: Form, position: int, emit: NodeBuilder) -> fx.Node | str:
    """Compute `mm`, `bmm` or `addmm`.

    y = mm(x, t(w))   with row tiles:  y = cat([mm(x, t(w_0)), mm(x, t(w_1))], 1)
    y = mm(x, w)      with row tiles:  y = addmm(mm(slice(x, 1, 0, r), w_0), slice(x, 1, r, n), w_1)
    """
    biased = node.target is aten.addmm.default
    if position < int(biased):
        return "it is the bias of a matrix product"
    left = position == int(biased)
    other = node.args[int(biased) + (1 if left else 0)]
    assert isinstance(other, fx.Node)
    batched = node.target is aten.bmm.default
    summed, kept = (2, 1) if left else (1, 2)  # dimensions of the batched operand
    tiles = [(number, box if batched else ((0, 1), *box)) for number, box in form.tiles()]
    rows = []
    for batch in _spans(tiles, 0):
        columns = []
        for span in _spans(tiles, kept):
            parts = sorted((box[summed], number) for number, box in tiles if (box[0], box[kept]) == (batch, span))
            if not parts:
                return "its tiles are no grid of rows and columns"
            columns.append(_products(node, form, emit, other, left, batch, span, parts))
        rows.append(_cat(columns, kept - (0 if batched else 1), emit))
    return _cat(rows, 0, emit)


def _products(
    node: fx.Node,
    form: Form,
    emit: NodeBuilder,
    other: fx.Node,
    left: bool,
    batch: Span,
    span: Span,
    parts: Sequence[tuple[Span, int]],
) -> fx.Node:
    """Return one block of the result: the sum over the tiles of one row or column."""
    batched, biased = node.target is aten.bmm.default, node.target is aten.addmm.default
    own = slice_of(other, 0, batch, emit) if batched else other
    total: fx.Node | None = None
    for summed, number in parts:
        tile = form.derive(number, emit)
        across = slice_of(own, (1 if left else 2) - (0 if batched else 1), summed, emit)
        operands = (tile, across) if left else (across, tile)
        if total is not None:
            scale = {name: value for name, value in node.kwargs.items() if name == "alpha"}
            total = emit(aten.baddbmm.default if batched else aten.addmm.default, total, *operands, kwargs=scale)
        elif biased:
            total = emit(
                aten.addmm.default, _bias_part(node.args[0], 0 if left else 1, span, emit), *operands, kwargs=node.kwargs
            )
        else:
            total = emit(node.target, *operands)
    assert total is not None, "a block has tiles"
    return total


def _bias_part(bias: object, dim: int, span: Span, emit: NodeBuilder) -> fx.Node:
    """Return the part of a bias that is added to a span of the result's rows (0) or columns (1)."""
    assert isinstance(bias, fx.Node)
    shape = fake_value(bias).shape
    own = dim - 2 + len(shape)  # shapes are aligned at their ends
    return bias if own < 0 or shape[own] == 1 else slice_of(bias, own, span, emit)


def _embedding(node: fx.Node, form: Form, position: int, emit: NodeBuilder) -> fx.Node | str:
    """Replace an embedding by `gather_rows`, or by one embedding per tile and a selection.

        y = gather_rows(w, i)

    if tiles are contiguous whole rows; else each tile looks up all indices, and `where` keeps the rows that it has:

        y = embedding(w, i)
        y = embedding(w_0, where(lt(i, r), i, r - 1))
        z = embedding(w_1, where(ge(i, r), sub(i, r), 0));  y = where(ge(i, r), z, y)

    Indices out of range stay out of range, so that the operator raises.
    """
    if position != 0:
        return "its values are indices"
    if form.dims != (0, 1) or (len(node.args) > 3 and any(node.args[3:])):
        return "an embedding scales by frequency, is sparse, or looks up columns"
    indices = node.args[1]
    assert isinstance(indices, fx.Node)
    whole_rows = rounds_of_rows(form.slot.shape, form.slot.stride, form.slot.tiles) and not (form.fixed or form.windows)
    if whole_rows and all(map(_keeps_rows, form.chain)):
        found = emit(ops.gather_rows, form.unit, indices, name="rows")
        for cast in filter(is_cast, form.chain):
            found = emit(cast.target, found, *cast.args[1:], kwargs=cast.kwargs)
        return found
    tiles = form.tiles()
    rows = _spans(tiles, 0)
    result: fx.Node | None = None
    for index, (start, end) in enumerate(rows):
        local = emit(aten.sub.Tensor, indices, start) if start else indices
        if index + 1 < len(rows):
            local = emit(aten.where.ScalarOther, emit(aten.lt.Scalar, indices, end), local, end - start - 1)
        if start:
            local = emit(aten.where.ScalarOther, emit(aten.ge.Scalar, indices, start), local, 0)
        columns = sorted((box[1], number) for number, box in tiles if box[0] == (start, end))
        looked_up = _cat([emit(aten.embedding.default, form.derive(n, emit), local) for _, n in columns], -1, emit)
        if result is None:
            result = looked_up
        else:
            here = emit(aten.unsqueeze.default, emit(aten.ge.Scalar, indices, start), -1)
            result = emit(aten.where.self, here, looked_up, result)
    assert result is not None, "a parameter has tiles"
    return result


def _keeps_rows(step: fx.Node) -> bool:
    return is_cast(step) or step.target in ALIASES


def _spans(tiles: Sequence[tuple[int, Box]], dim: int) -> list[Span]:
    return sorted({box[dim] for _, box in tiles})


def _cat(parts: Sequence[fx.Node], dim: int, emit: NodeBuilder) -> fx.Node:
    return parts[0] if len(parts) == 1 else emit(aten.cat.default, list(parts), dim)


_RULES: dict[object, Callable[[fx.Node, Form, int, NodeBuilder], fx.Node | str]] = {
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.addmm.default: _matmul,
    aten.embedding.default: _embedding,
}
