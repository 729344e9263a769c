"""Move the gradient of each tile next to the last use of the tile."""

from __future__ import annotations

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.passes.graph.alias import derived_from
from zinf_compile.passes.graph.node_facts import positions, tile_of


def sink_tile_gradients(gm: fx.GraphModule) -> fx.GraphModule:
    """Move the operators that compute a tile's gradient, and its reduce-scatter, behind the last use of the tile.

        before:  g_0 = mm(d_0, x);  g_1 = mm(d_1, x);  a = mm(y_0, w_tile_0);  b = addmm(a, y_1, w_tile_1)
                 r = reduce_scatter(g_0, w_tile_0);  s = reduce_scatter(g_1, w_tile_1)
        after:   a = mm(y_0, w_tile_0);  g_0 = mm(d_0, x);  r = reduce_scatter(g_0, w_tile_0)
                 b = addmm(a, y_1, w_tile_1);  g_1 = mm(d_1, x);  s = reduce_scatter(g_1, w_tile_1)

    The partitioner puts these operators first. There, the gradients of all tiles would be live at once, as large as the parameter
    that is tiled to avoid this. Operators with other users stay.
    """
    place = positions(gm.graph)
    latest: dict[fx.Node, fx.Node] = {}
    for reduction in [node for node in gm.graph.nodes if node.target is ops.reduce_scatter]:
        grad, unit = reduction.args[:2]
        assert isinstance(grad, fx.Node)
        assert isinstance(unit, fx.Node)
        if tile_of(unit) is None:
            continue
        block = _operators_of(reduction, place)
        needed = {source for node in block for source in node.all_input_nodes} - set(block)
        uses = {user for node in derived_from([unit]) | {unit} for user in node.users} - set(block)
        anchor = max(needed | {use for use in uses if use.op == "call_function"}, key=place.__getitem__)
        last = latest.get(anchor, anchor)
        if last.op == "placeholder":  # before the first operator
            last = next(node for node in reversed(gm.graph.nodes) if node.op == "placeholder")
        for node in block:
            last.append(node)
            last = node
        latest[anchor] = last
    return gm


def _operators_of(reduction: fx.Node, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Return the reduce-scatter and the operators that only it uses, in order."""
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
