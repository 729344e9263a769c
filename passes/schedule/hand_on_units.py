"""Hand units on from a forward to its backward where the plan says so."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from zinf_compile.passes.analysis.planned_graph import Planner
from zinf_compile.passes.analysis.step_regions import Residence, find_regions
from zinf_compile.passes.graph.found_units import mark_found
from zinf_compile.passes.graph.node_facts import slot_behind


def hand_on_units(gm: fx.GraphModule, *, plan: Planner) -> fx.GraphModule:
    """Release the units that a forward leaves behind all compute, and mark a backward's first gathers of those that it finds.

    before:  g = all_gather(w);  v = wait(g);  a = mm(x, v);  release(v);  b = relu(a)
    after:   g = all_gather(w);  v = wait(g);  a = mm(x, v);  b = relu(a);  release(v)

    Runs on gathers just in time: a unit that isn't found is brought right before its use, in no more memory than the plan has for
    it until then.
    """
    planned = plan(gm.graph)
    if not planned.leaves and not planned.finds:
        return gm
    first: dict[Hashable, Residence] = {}
    last: dict[Hashable, Residence] = {}
    for stay in find_regions(gm.graph).residences:
        slot = slot_behind(stay.gather)
        if planned.units.get(slot.name) in planned.finds:
            first.setdefault(slot.key, stay)
        if planned.units.get(slot.name) in planned.leaves:
            last[slot.key] = stay
    for stay in first.values():
        mark_found(stay.gather)
    for stay in last.values():
        gm.graph.output_node().prepend(stay.release)
    return gm
