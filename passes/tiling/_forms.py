"""Forms of a tiled parameter: values derived from it by views and casts, with the tiles they consist of.

`tile_matmuls` derives the same form of each tile in the place of the whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiling import Box
from zinf_compile.passes.graph.alias import ALIASES, MOVES, is_cast, is_view
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import recompute, tile_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Form:
    """A parameter after permutations, selections, slices at borders of tiles, and casts."""

    unit: fx.Node
    slot: ParameterSlot
    dims: tuple[int, ...]
    """Dimensions of the parameter, in the order of the value's dimensions."""
    fixed: tuple[tuple[int, int], ...] = ()
    """(dimension, index) of each selection."""
    windows: tuple[tuple[int, int, int], ...] = ()
    """(dimension, start, end) of each slice [start, end), both at borders of tiles."""
    chain: tuple[fx.Node, ...] = ()
    """Operators from the parameter to the value."""

    def step(self, node: fx.Node) -> Form | None:
        """Return the form of `node`, an operator on the value; None where its result has no form."""
        chain = (*self.chain, node)
        if is_cast(node) or node.target in ALIASES:
            return dataclasses.replace(self, chain=chain)
        rank = len(self.dims)
        match node.target, node.args[1:]:
            case aten.t.default, ():
                return dataclasses.replace(self, dims=self.dims[::-1], chain=chain)
            case aten.transpose.int, (int() as one, int() as other):
                dims = list(self.dims)
                dims[one], dims[other] = dims[other], dims[one]
                return dataclasses.replace(self, dims=tuple(dims), chain=chain)
            case aten.permute.default, (order,) if isinstance(order, (list, tuple)):
                dims_ = tuple(self.dims[position] for position in order)
                return dataclasses.replace(self, dims=dims_, chain=chain)
            case aten.select.int, (int() as dim, int() as index) if rank > 2:
                selected = self.dims[dim % rank]
                first, last = next(((a, b) for d, a, b in self.windows if d == selected), (0, self.slot.shape[selected]))
                return dataclasses.replace(
                    self,
                    dims=tuple(d for d in self.dims if d != selected),
                    fixed=(*self.fixed, (selected, first + index % (last - first))),
                    windows=tuple(window for window in self.windows if window[0] != selected),
                    chain=chain,
                )
            case aten.slice.Tensor, (int() as dim, int() as start, int() as end) if start >= 0:
                own = self.dims[dim % rank]
                end = min(end, self.slot.shape[own])
                whole = all(dim != own for dim, *_ in (*self.windows, *self.fixed))
                edges = {edge for box in self.slot.tiles for edge in box[own]}
                if whole and start < end and {start, end} <= edges:
                    return dataclasses.replace(self, windows=(*self.windows, (own, start, end)), chain=chain)
        return None

    def tiles(self) -> list[tuple[int, Box]]:
        """Return the tiles that the value consists of: each one's number, and its box in the value."""
        found = []
        offset = {dim: start for dim, start, _ in self.windows}
        for number, box in enumerate(self.slot.tiles):
            inside = all(start <= box[dim][0] and box[dim][1] <= end for dim, start, end in self.windows)
            if inside and all(box[dim][0] <= index < box[dim][1] for dim, index in self.fixed):
                shifted = ((box[dim][0] - offset.get(dim, 0), box[dim][1] - offset.get(dim, 0)) for dim in self.dims)
                found.append((number, tuple(shifted)))
        return found

    def derive(self, number: int, emit: NodeBuilder) -> fx.Node:
        """Repeat `chain` on tile `number`."""
        box = self.slot.tiles[number]
        node = emit_tile(self.unit, box, emit)
        dims = list(range(len(box)))
        for step in self.chain:
            if step.target is aten.slice.Tensor:  # contains the whole tile
                continue
            args: tuple[Any, ...] = (node, *step.args[1:])
            if step.target is aten.select.int:
                (dim,) = integers(step.args[1:2])
                selected = dims.pop(dim % len(dims))
                args = (node, dim, dict(self.fixed)[selected] - box[selected][0])
            elif step.target in MOVES:
                before = Form(self.unit, self.slot, tuple(dims)).step(step)
                assert before is not None, "steps of a chain have a form"
                dims = list(before.dims)
            node = emit(step.target, *args, like=step, kwargs=step.kwargs)
        return node


def integers(values: Any) -> list[int]:
    """Return an operator's sizes or indices, which must be static."""
    assert all(isinstance(value, int) for value in values), "dynamic sizes have no form"
    return list(values)


def emit_tile(unit: fx.Node, box: Box, emit: NodeBuilder) -> fx.Node:
    """Insert a `tile` of a parameter, which the backward recomputes."""
    start, end = ([edge[side] for edge in box] for side in (0, 1))
    tile = emit(ops.tile, unit, start, end, name=f"{unit.name}_tile")
    recompute(tile)
    return tile


def is_of_tile(operand: fx.Node) -> bool:
    """Return whether a value is a view or cast of a tile: of a `tile` operator, or of a gathered tile."""
    while is_view(operand) or is_cast(operand) or operand.target in (ops.wait, ops.all_gather, ops.swap_in):
        operand = operand.all_input_nodes[0]
    return operand.target is ops.tile or tile_of(operand) is not None


def box_of(tile: fx.Node) -> tuple[fx.Node, Box]:
    """Return the parameter and the box of a `tile` operator."""
    unit, start, end = tile.args
    assert isinstance(unit, fx.Node)
    return unit, tuple(zip(start, end, strict=True))  # type: ignore[arg-type]
