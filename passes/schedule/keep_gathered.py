"""Keep units gathered between two uses where the plan says so."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from zinf_compile.passes.analysis.planned_graph import Planner
from zinf_compile.passes.analysis.step_regions import Residence, find_regions
from zinf_compile.passes.graph.node_facts import slot_behind, wire_type


def keep_gathered(gm: fx.GraphModule, *, plan: Planner) -> fx.GraphModule:
    """Drop a release and the unit's next gather where one row of the plan covers both uses.

    before:  g = all_gather(w);  v = wait(g);  a = mm(x, v);  release(v);  b = relu(a)
             h = all_gather(w);  u = wait(h);  c = mm(b, u);  release(u)
    after:   g = all_gather(w);  v = wait(g);  a = mm(x, v);  b = relu(a);  c = mm(b, v);  release(v)

    Runs on gathers just in time. What else a plan could keep, a unit in another data type, is another copy.
    """
    planned = plan(gm.graph)
    latest: dict[Hashable, tuple[Residence, fx.Node]] = {}
    for stay in find_regions(gm.graph).residences:
        slot = slot_behind(stay.gather)
        key = slot.key, wire_type(stay.gather)
        wait = next(iter(stay.gather.users))
        if key in latest and not planned.brings(slot.name, stay.due):
            earlier, full = latest[key]
            wait.replace_all_uses_with(full)
            for node in (earlier.release, wait, stay.gather):
                gm.graph.erase_node(node)
            latest[key] = stay, full
        else:
            latest[key] = stay, wait
    return gm
