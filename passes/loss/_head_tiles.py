"""Tiles of a head's weight and bias. `_loop_tiles` computes a loss with one of them at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value, slot_of
from zinf_compile.passes.tiling._forms import Form

from ._loop import Tile

aten = torch.ops.aten


def tiles_of_head(insert: NodeBuilder, weight: fx.Node, bias: fx.Node | None) -> Sequence[Tile]:
    """Return the tiles of a head if its parameter is tiled by rows (classes), else the whole head as one tile."""
    classes, width = fake_value(weight).shape
    form = _form_of(weight)
    boxes = [box for _, box in form.tiles()] if form is not None else []
    rows = sorted({box[0] for box in boxes})
    if len(rows) < 2 or any(box[1] != (0, width) for box in boxes):
        return [Tile(0, classes, weight, bias)]
    return [
        Tile(
            start,
            end,
            insert(aten.slice.Tensor, weight, 0, start, end),
            bias if bias is None else insert(aten.slice.Tensor, bias, 0, start, end),
        )
        for start, end in rows
    ]


def _form_of(node: fx.Node) -> Form | None:
    """Return the form of a value that is derived from a tiled parameter, None for other values."""
    slot = slot_of(node)
    if slot is not None:
        return Form(node, slot, tuple(range(len(slot.shape)))) if slot.tiles else None
    source = node.args[0] if node.op == "call_function" and node.args else None
    before = _form_of(source) if isinstance(source, fx.Node) else None
    return before.step(node) if before is not None else None
