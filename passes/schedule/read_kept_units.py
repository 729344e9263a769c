"""Read units that the forward has kept, instead of gathering them again."""

from __future__ import annotations

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.graph.node_facts import fake_value, kept_units, slot_behind, slot_of


def read_kept_units(gm: fx.GraphModule) -> fx.GraphModule:
    """Drop the gathers and releases of units that `keep_for_backward` has given to this backward.

        before:  g = all_gather(w);  v = wait(g);  b = mm(x, v);  release(v)
        after:   b = mm(x, k)

    where `k` is the kept value of `w`. Runs on gathers just in time, whose regions stay as they are: what is compiled as one does
    not depend on what is kept.
    """
    kept = kept_units(gm.graph)
    if not kept:
        return gm
    by_slot = {slot.key: kept[node.name] for node in gm.graph.nodes if (slot := slot_of(node)) is not None and node.name in kept}
    for gather in [node for node in gm.graph.nodes if node.target is ops.all_gather]:
        full = next(iter(gather.users))
        value = by_slot.get(slot_behind(gather).key)
        if value is None or fake_value(value).dtype != fake_value(full).dtype:
            continue
        for release in [user for user in full.users if user.target is ops.release]:
            gm.graph.erase_node(release)
        full.replace_all_uses_with(value)
        gm.graph.erase_node(full)
        gm.graph.erase_node(gather)
    return gm
