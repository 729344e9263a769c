"""Turn each tile of a parameter into an input of the graph."""

from __future__ import annotations

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.graph.node_facts import mark_joined, mark_tile, slot_of

from ._forms import box_of


def lift_tiles(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace each `tile` by a placeholder with its own slot, and each `join_tiles` by the gradients of the tiles.

        before:  a = tile(w, [0, 0], [4, 8]);  y = mm(x, a);  s = reduce_scatter(g, a);  j = join_tiles([s, r], w);  return (y, j)
        after:   y = mm(x, w_tile_0);  s = reduce_scatter(g, w_tile_0);  return (y, s, r)

    Later passes then treat a tile as a parameter. The placeholders come after the graph's own inputs, and a gradient's further
    tiles after its own outputs. Callers of the graph see neither.
    """
    last = next((node for node in reversed(gm.graph.nodes) if node.op == "placeholder"), None)
    lifted: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in [node for node in gm.graph.nodes if node.target is ops.tile]:
        unit, box = box_of(node)
        slot = slot_of(unit)
        assert slot is not None
        assert last is not None
        number = slot.tiles.index(box)
        if (unit, number) not in lifted:
            with gm.graph.inserting_after(last):
                last = gm.graph.create_node("placeholder", f"{unit.name}_tile_{number}", name=f"{unit.name}_tile_{number}")
            last.meta["val"] = node.meta["val"]
            mark_tile(last, unit, slot.cut(number))
            lifted[unit, number] = last
        node.replace_all_uses_with(lifted[unit, number])
        gm.graph.erase_node(node)
    _split_outputs(gm)
    return gm


def _split_outputs(gm: fx.GraphModule) -> None:
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    results = list(output.args[0])
    own = len(results)
    for position, joined in enumerate(results[:own]):
        if isinstance(joined, fx.Node) and joined.target is ops.join_tiles:
            parts = list(joined.args[0])  # type: ignore[arg-type]
            mark_joined(gm, position, (position, *range(len(results), len(results) + len(parts) - 1)))
            results[position] = parts[0]
            results += parts[1:]
            output.args = (tuple(results),)
            gm.graph.erase_node(joined)
    if len(results) > own:
        output.args = (tuple(results),)
