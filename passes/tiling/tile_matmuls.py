"""Compute with large parameters tile by tile."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from zinf_compile._torch import gradient_outputs
from zinf_compile.ir import ops
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.graph.alias import METADATA_OPS
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import leave_whole, parameters

from ._forms import Form
from ._gradients import GradientTiles
from ._uses import tile_use


def tile_matmuls(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace products with a tiled parameter by products with each tile, and its gradient by a gradient of each tile.

        before:  t = t(w);  y = mm(x, t);                                       g = t(mm(t(dy), x));  return [y, g]
        after:   a = tile(w, ..);  y_0 = mm(x, t(a));  b = tile(w, ..);  y_1 = mm(x, t(b));  y = cat([y_0, y_1], 1)
                 g_0 = t(mm(slice(t(dy), 0, 0, r), x));  g_1 = ..;  return [y, join_tiles([g_0, g_1], w)]

    Runs on a joint graph before partitioning, or on an inference graph. From here on each tile is a unit that is gathered,
    released and reduced alone. Other uses read the whole parameter; the dump shows the reason.
    """
    cut = [(node, slot) for node, slot in parameters(gm.graph) if slot.tiles]
    forms: dict[fx.Node, Form] = {}
    for unit, slot in cut:
        _find_forms(Form(unit, slot, tuple(range(len(slot.shape)))), forms)
    for source, form in forms.items():
        for user in list(source.users):
            if user not in forms and user.op == "call_function" and user.target not in METADATA_OPS:
                _tile_use(gm, user, source, form, forms)
    if cut:
        _cut_gradients(gm, {slot.index: (unit, slot) for unit, slot in cut})
        gm.graph.eliminate_dead_code()  # replaced wholes, and operators that only they used
    return gm


def _find_forms(whole: Form, forms: dict[fx.Node, Form]) -> None:
    """Add the parameter and all values derived from it that have a form."""
    forms[whole.unit] = whole
    stack = [whole.unit]
    while stack:
        source = stack.pop()
        for user in source.users:
            form = forms[source].step(user) if user.op == "call_function" and user.args and user.args[0] is source else None
            if form is not None and user not in forms:
                forms[user] = form
                stack.append(user)


def _tile_use(gm: fx.GraphModule, node: fx.Node, source: fx.Node, form: Form, forms: Mapping[fx.Node, Form]) -> None:
    if node.target is ops.tile:
        return
    positions = [position for position, argument in enumerate(node.args) if argument is source]
    tiled = [n for n in node.all_input_nodes if n in forms]
    if len(positions) != 1 or len(tiled) != 1:
        leave_whole(gm, form.slot, f"{node.name} takes it more than once, or with another that is in tiles")
        return
    result = tile_use(node, form, positions[0], NodeBuilder(gm.graph, node))
    if isinstance(result, str):
        leave_whole(gm, form.slot, f"{node.name}: {result}")
    else:
        node.replace_all_uses_with(result)


def _cut_gradients(gm: fx.GraphModule, units: Mapping[int, tuple[fx.Node, ParameterSlot]]) -> None:
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    results = list(output.args[0])
    tiles = GradientTiles(gm.graph)
    for position, index in gradient_outputs(output).items():
        grad = results[position]
        if index not in units or not isinstance(grad, fx.Node):
            continue
        unit, slot = units[index]
        parts = tiles.cut(grad, slot.tiles)
        if isinstance(parts, str):
            leave_whole(gm, slot, parts)
            continue
        with gm.graph.inserting_before(output):
            joined = gm.graph.create_node("call_function", ops.join_tiles, (parts, unit), name="gradient")
        joined.meta = {key: value for key, value in grad.meta.items() if key not in ("tensor_meta", "recompute")}
        joined.meta["partitioner_tag"] = "is_backward"
        results[position] = joined
    output.args = (type(output.args[0])(results),)
