"""Read units that the forward has kept, instead of gathering them again."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.graph.node_facts import fake_value, kept_units, slot_behind, slot_of


def read_kept_units(gm: fx.GraphModule) -> fx.GraphModule:
    """Drop the gathers and releases of units that `keep_for_backward` has kept before in this forward, or given to this backward.

        before:  g = all_gather(w);  v = wait(g);  b = mm(x, v);  release(v)
        after:   b = mm(x, k)

    where `k` is the kept value of `w`. Runs on gathers just in time, whose regions stay as they are: what is compiled as one does
    not depend on what is kept.
    """
    given, kept = kept_units(gm.graph), dict[Hashable, fx.Node]()
    for node in list(gm.graph.nodes):
        if (slot := slot_of(node)) is not None and node.name in given:
            kept[slot.key] = given[node.name]
        elif node.target is ops.keep_for_backward:
            kept[slot_behind(node).key] = node
        if node.target is not ops.all_gather or slot_behind(node).key not in kept:
            continue
        value, full = kept[slot_behind(node).key], next(iter(node.users))
        if fake_value(value).dtype != fake_value(full).dtype:
            continue
        for release in [user for user in full.users if user.target is ops.release]:
            gm.graph.erase_node(release)
        full.replace_all_uses_with(value)
        gm.graph.erase_node(full)
        gm.graph.erase_node(node)
    return gm
