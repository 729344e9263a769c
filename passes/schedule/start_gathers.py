"""Start each gather at the boundary that the plan says."""

from __future__ import annotations

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP
from zinf_compile.passes.analysis.planned_graph import Planner
from zinf_compile.passes.analysis.step_regions import Residence, find_regions, region_starts, transfers_before
from zinf_compile.passes.graph.node_facts import slot_behind


def start_gathers(gm: fx.GraphModule, *, plan: Planner) -> fx.GraphModule:
    """Move each gather to its boundary, in front of the waits there.

    before:  g = all_gather(w0, 0);  v = wait(g);  a = mm(x, v);  release(v)
             h = all_gather(w1, 1);  u = wait(h);  b = mm(a, u);  release(u)
    after:   g = all_gather(w0, 0);  h = all_gather(w1, 1);  v = wait(g);  a = mm(x, v);  release(v)
             u = wait(h);  b = mm(a, u);  release(u)

    Gathers of one group start when the last of them does. Runs on gathers just in time; at one boundary they keep their order.
    """
    planned = plan(gm.graph)
    starts = region_starts(gm.graph)
    groups: list[list[Residence]] = []
    for stay in find_regions(gm.graph).residences:
        if not groups or stay.group == LONE_GROUP or stay.group != groups[-1][-1].group:
            groups.append([])
        groups[-1].append(stay)
    for group in groups:
        boundary = max(planned.starts_gather(slot_behind(stay.gather).name, stay.due) for stay in group)
        place = transfers_before(starts[boundary], {ops.wait})
        for stay in group:
            place.prepend(stay.gather)
    return gm
