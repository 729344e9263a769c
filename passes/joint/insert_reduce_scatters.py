"""Reduce-scatter the gradient of each parameter, on the joint graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zinf_compile._torch import gradient_outputs
from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import parameters, slot_behind, slot_of
from zinf_compile.passes.tiling._forms import emit_tile


def insert_reduce_scatters(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace each parameter's gradient by its averaged shard.

        before:  y = mm(w, x);  t = t(x);  dw = mm(dy, t);                               return [y, dw, None]
        after:   y = mm(w, x);  t = t(x);  dw = mm(dy, t);  s = reduce_scatter(dw, w);   return [y, s, None]

    The operator has `dtype=` if the gradient is reduced in another type than the parameter's, and `at_step=True` if it is kept
    whole until the step; a gradient in tiles never is.

    Runs on the joint graph before partitioning. The use of `w` makes the partitioner pass the hollow parameter to the backward,
    at no cost, even if the gradient's formula doesn't read it (biases, the first layer).
    """
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    results = list(output.args[0])
    placeholders = {slot.index: node for node, slot in parameters(gm.graph)}
    last_input = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    for position, index in gradient_outputs(output).items():
        grad, unit = results[position], placeholders.get(index)
        if unit is None or not isinstance(grad, fx.Node):
            continue
        if grad.target is ops.join_tiles:
            _reduce_tiles(gm.graph, grad)
            continue
        with gm.graph.inserting_after(last_input if grad.op == "placeholder" else grad):
            results[position] = _reduce(gm.graph, grad, unit)
        results[position].meta["desc"] = grad.meta.get("desc")
    output.args = (type(output.args[0])(results),)
    return gm


def _reduce(graph: fx.Graph, grad: fx.Node, unit: fx.Node) -> fx.Node:
    slot = slot_behind(unit)
    kwargs: dict[str, Any] = {} if slot.reduced_in is None else {"dtype": slot.reduced_in}
    if slot.reduced_at_step:
        kwargs["at_step"] = True
    shard = graph.create_node("call_function", ops.reduce_scatter, (grad, unit, LONE_GROUP), kwargs, name="shard")
    shard.meta["val"] = torch.empty_like(grad.meta["val"])
    shard.meta["partitioner_tag"] = "is_backward"
    return shard


def _reduce_tiles(graph: fx.Graph, joined: fx.Node) -> None:
    """Reduce-scatter each tile of a gradient."""
    parts, unit = joined.args  # a part may occur more than once
    assert isinstance(parts, (list, tuple))
    assert isinstance(unit, fx.Node)
    slot = slot_of(unit)
    assert slot is not None
    shards = []
    for part, box in zip(parts, slot.tiles, strict=True):
        assert isinstance(part, fx.Node)
        emit = NodeBuilder(graph, part, after=True)
        tile = emit_tile(unit, box, emit)
        with graph.inserting_after(tile):
            shards.append(_reduce(graph, part, tile))
    joined.args = (shards, unit)
