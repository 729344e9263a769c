"""Start each hop of a shard to the device at the boundary that the plan says."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.planned_graph import Planner
from zinf_compile.passes.analysis.step_regions import region_starts, transfers_before
from zinf_compile.passes.graph.node_facts import group_of, hop_of, set_group, slot_behind, starts_region


def start_swaps(gm: fx.GraphModule, *, plan: Planner) -> fx.GraphModule:
    """Move each swap_in to its boundary, in front of the gathers there.

    before:  s = swap_in(w0, "host", "device", 0);  g = all_gather(s, 0);  v = wait(g);  a = mm(x, v);  release(v)
             t = swap_in(w1, "host", "device", 1);  h = all_gather(t, 1);  u = wait(h);  b = mm(a, u);  release(u)
    after:   s = swap_in(w0, "host", "device", 0);  t = swap_in(w1, "host", "device", 1);  g = all_gather(s, 0);  v = wait(g)
             a = mm(x, v);  release(v);  h = all_gather(t, 1);  u = wait(h);  b = mm(a, u);  release(u)

    Swaps of one group that start at different boundaries are groups of their own from then on.
    """
    planned = plan(gm.graph)
    starts = region_starts(gm.graph)
    waited, region = dict[fx.Node, int](), -1
    for node in gm.graph.nodes:
        region += starts_region(node)
        if node.target is ops.wait:
            waited[node.args[0]] = region + 1
    swaps = [node for node in gm.graph.nodes if node.target is ops.swap_in]
    numbers = itertools.count(max(map(group_of, swaps), default=LONE_GROUP) + 1)
    first: dict[Hashable, int] = {}
    renamed: dict[Hashable, int] = {}
    for node in swaps:
        source, to = map(Tier, hop_of(node))
        boundary = planned.starts_hop(slot_behind(node).name, waited[_gather_of(node)], source, to)
        transfers_before(starts[boundary], {ops.all_gather, ops.wait}).prepend(node)
        group = group_of(node), source, to
        if group_of(node) != LONE_GROUP and first.setdefault(group, boundary) != boundary:
            if (group, boundary) not in renamed:
                renamed[group, boundary] = next(numbers)
            set_group(node, renamed[group, boundary])
    return gm


def _gather_of(swap: fx.Node) -> fx.Node:
    node = swap
    while node.target is ops.swap_in:
        node = next(iter(node.users))
    return node
