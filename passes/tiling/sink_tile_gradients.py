"""Compute the gradient of each tile where the tile itself is used, not all of them at once."""

from __future__ import annotations

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.passes.graph.alias import derived_from
from zinf_compile.passes.graph.node_facts import positions, tile_of


def sink_tile_gradients(gm: fx.GraphModule) -> fx.GraphModule:
    """Move what computes a tile's gradient behind the last use of the tile, and its reduction with it.

        before:  g_0 = mm(d_0, x);  g_1 = mm(d_1, x);  a = mm(y_0, w_tile_0);  b = addmm(a, y_1, w_tile_1)
                 r = reduce_scatter(g_0, w_tile_0);  s = reduce_scatter(g_1, w_tile_1)
        after:   a = mm(y_0, w_tile_0);  g_0 = mm(d_0, x);  r = reduce_scatter(g_0, w_tile_0)
                 b = addmm(a, y_1, w_tile_1);  g_1 = mm(d_1, x);  s = reduce_scatter(g_1, w_tile_1)

    The partitioner puts what depends on nothing else first; left there, all gradients would be in memory, and the parameter has
    tiles because it mustn't be there as a whole. What others read too stays where it is.
    """
    place = positions(gm.graph)
    emit: dict[fx.Node, fx.Node] = {}
    for reduction in [node for node in gm.graph.nodes if node.target is ops.reduce_scatter]:
        grad, unit = reduction.args[:2]
        assert isinstance(grad, fx.Node)
        assert isinstance(unit, fx.Node)
        if tile_of(unit) is None:
            continue
        block = _made_for(reduction, place)
        needed = {source for node in block for source in node.all_input_nodes} - set(block)
        uses = {user for node in derived_from([unit]) | {unit} for user in node.users} - set(block)
        anchor = max(needed | {use for use in uses if use.op == "call_function"}, key=place.__getitem__)
        last = emit.get(anchor, anchor)
        if last.op == "placeholder":  # in front of all that is computed
            last = next(node for node in reversed(gm.graph.nodes) if node.op == "placeholder")
        for node in block:
            last.append(node)
            last = node
        emit[anchor] = last
    return gm


def _made_for(reduction: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Return the reduction, and the operators before it whose results nobody else reads, in order."""
    block = {reduction}
    stack = [reduction.args[0]]
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function" or node in block:
            continue
        if node.target not in SCHEDULE_OPS and all(user in block for user in node.users):
            block.add(node)
            stack += node.all_input_nodes
    return sorted(block, key=place.__getitem__)
