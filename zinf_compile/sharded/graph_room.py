"""The memory that a planner may use for the units of one graph, region by region."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zinf_compile.passes.analysis.step_regions import find_regions
from zinf_compile.plan.graph_plan import GraphPlan, GraphRoom
from zinf_compile.plan.memory_model import TransientMemory


def room_for_units(graph: fx.Graph, transient: TransientMemory, plan: GraphPlan, free: Sequence[int]) -> GraphRoom:
    """Return the bytes for gathered units and shards in flight, with `free`: what compute leaves in each region, if known.

    What is planned for gradients on their way is free until the first one is complete.
    """
    ahead = transient.full + plan.ahead
    first = min((region for _, region in find_regions(graph).reductions), default=0)
    for_gradients = transient.reduced + plan.reduced
    return GraphRoom(
        ahead * transient.on_device,
        ahead * transient.on_host,
        [count + (for_gradients if region < first else 0) for region, count in enumerate(free)],
        transient.compute.results,
    )
