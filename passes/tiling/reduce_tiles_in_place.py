"""Write the gradients of tiles into buffers of the runtime."""

from __future__ import annotations

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.passes.graph.alias import aliased_inputs
from zinf_compile.passes.graph.build_nodes import NodeBuilder, new_node
from zinf_compile.passes.graph.node_facts import fake_mode_of, fake_value, move_region_mark, starts_region, tile_of

from .write_tiles_in_place import INTO


def reduce_tiles_in_place(gm: fx.GraphModule) -> fx.GraphModule:
    """Let a product that computes a tile's gradient write into a `reduce_buffer`, which the runtime allocates.

        before:  t = t(d);  g = mm(t, x);  s = reduce_scatter(g, w_tile_0)
        after:   r = reduce_buffer(w_tile_0);  t = t(d);  mm_out(r, t, x);  s = reduce_scatter(r, w_tile_0)

    On one process the buffer is the tile's part of the whole parameter's gradient, which saves a copy. Gradients with other
    users, and those that need another layout or data type first, stay as they are.
    """
    for reduction in [node for node in gm.graph.nodes if node.target is ops.reduce_scatter]:
        grad, unit = reduction.args[:2]
        assert isinstance(grad, fx.Node)
        assert isinstance(unit, fx.Node)
        made = _made_by_product(grad)
        if tile_of(unit) is None or not made or not _form(grad) == _form(made[-1]) == _form(unit):
            continue
        product = made[-1]
        with gm.graph.inserting_before(_start_of_region(product)):
            buffer = new_node(gm.graph, fake_mode_of(product), ops.reduce_buffer, (unit,), {}, "buffer")
        into = NodeBuilder(gm.graph, product)(INTO[product.target], buffer, *product.args, kwargs=product.kwargs)
        move_region_mark(product, into)
        reduction.args = (buffer, *reduction.args[1:])
        for node in made:
            gm.graph.erase_node(node)
    return gm


def _made_by_product(grad: fx.Node) -> list[fx.Node]:
    """Return the chain of views from a gradient to the product that computes it, empty if one has another user."""
    made = [grad]
    while len(made[-1].users) == 1:
        if made[-1].target in INTO:
            return made
        sources = aliased_inputs(made[-1])
        if len(sources) != 1:
            break
        made.append(sources[0])
    return []


def _form(node: fx.Node) -> tuple[object, ...]:
    value = fake_value(node)
    return tuple(value.shape), value.stride(), value.dtype


def _start_of_region(node: fx.Node) -> fx.Node:
    before = node.prev
    while not starts_region(node) and before.op == "call_function" and before.target not in (*SCHEDULE_OPS, ops.reduce_buffer):
        node, before = before, before.prev
    return node
