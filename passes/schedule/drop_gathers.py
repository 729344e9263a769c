"""Read parameters that hold their values instead of gathering them."""

from __future__ import annotations

from torch import fx

from zinf_compile.ir import ops


def drop_gathers(gm: fx.GraphModule) -> fx.GraphModule:
    """Take out all gathers of a graph none of whose parameters is partitioned, and leave the marks of its regions.

        before:  g = all_gather(w);  v = wait(g);  t = t(v);  a = mm(x, t)
        after:   t = t(w);  a = mm(x, t)

    Runs behind `align_regions`: the regions are those of a graph whose parameters are partitioned, and compute the same bits.
    """
    for full in gm.graph.find_nodes(op="call_function", target=ops.wait):
        gather = full.args[0]
        full.replace_all_uses_with(gather.args[0])
        gm.graph.erase_node(full)
        gm.graph.erase_node(gather)
    return gm
