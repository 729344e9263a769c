"""Keep units gathered between two uses where the plan says so."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from zinf_compile.passes.analysis.planned_graph import Planner
from zinf_compile.passes.analysis.step_regions import find_regions
from zinf_compile.passes.graph.node_facts import positions, slot_behind, wire_type


def keep_gathered(gm: fx.GraphModule, *, plan: Planner) -> fx.GraphModule:
    """Drop a release and the unit's next gather where one row of the plan covers both uses.

    before:  g = all_gather(w);  v = wait(g);  a = mm(x, v);  release(v);  b = relu(a)
             h = all_gather(w);  u = wait(h);  c = mm(b, u);  release(u)
    after:   g = all_gather(w);  v = wait(g);  a = mm(x, v);  b = relu(a);  c = mm(b, v);  release(v)

    Runs on gathers just in time. What else a plan could keep, a unit in another data type, is another copy. Two stays overlap
    where a gather was grouped with earlier ones and compute of the forward that runs again in front of its use has one of its
    own: the first wait and the last release are kept.
    """
    planned, place = plan(gm.graph), positions(gm.graph)
    latest: dict[Hashable, tuple[fx.Node, fx.Node]] = {}
    for stay in find_regions(gm.graph).residences:
        slot = slot_behind(stay.gather)
        key = slot.key, wire_type(stay.gather)
        wait, release = next(iter(stay.gather.users)), stay.release
        full, earlier = latest.get(key, (wait, None))
        if earlier is not None and (place[earlier] > place[stay.gather] or not planned.brings(slot.name, stay.due)):
            if place[wait] < place[full]:
                wait.prepend(full)
                place[full] = place[wait]
            first, release = sorted((earlier, release), key=place.__getitem__)
            wait.replace_all_uses_with(full)
            for node in (first, wait, stay.gather):
                gm.graph.erase_node(node)
            wait = full
        latest[key] = wait, release
    return gm
