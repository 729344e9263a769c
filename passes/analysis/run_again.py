"""What it takes that compute of a forward runs again in its backward: seconds, and what is gathered for it once more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from zinf_compile.ir.forward_compute import Again
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.graph.node_facts import slot_behind, wire_format

from .region_facts import owners_of
from .step_facts import StepFacts
from .step_problem import seconds_of_region
from .step_regions import find_regions


class GraphCosts(NamedTuple):
    """What a step of some graphs costs, as far as it depends on what runs again."""

    gathered: Counter[tuple[ParameterSlot, int]]
    """How often each parameter is gathered, with the bytes of it as it is sent."""
    seconds: float
    """Of compute."""


def graph_costs(graphs: Sequence[fx.Graph], facts: StepFacts) -> GraphCosts:
    """Return the costs of graphs as `region_passes` leave them."""
    regions = [find_regions(graph) for graph in graphs]
    slots = ((slot_behind(stay.gather), wire_format(stay.gather)) for found in regions for stay in found.residences)
    seconds = sum(
        seconds_of_region(nodes, owners, facts)
        for graph, found in zip(graphs, regions, strict=True)
        for owners in (owners_of(graph),)
        for nodes in found.compute
    )
    return GraphCosts(Counter((slot, form.bytes(slot.numel)) for slot, form in slots), seconds)


def cost_again(
    before: GraphCosts, after: GraphCosts, facts: StepFacts, members: Mapping[str, Sequence[ParameterSlot]], *, blocks: int
) -> Again:
    """Return what `blocks` take that run again in the graphs that cost `after`, and don't in those that cost `before`.

    `members`: the slots of each unit by its name, of the problem that is solved.
    """
    unit_of = {slot.name: name for name, slots in members.items() for slot in slots}
    lanes: dict[str, float] = defaultdict(float)
    fetched: dict[str, int] = defaultdict(int)
    size = facts.world_size
    between = [link for link in facts.links if link.source is None]
    for slot, sent in (after.gathered - before.gathered).elements():
        for link in between:
            lanes[link.on_lane] += link.seconds((size - 1) * -(-sent // size))
        if slot.name in unit_of:
            fetched[unit_of[slot.name]] += slot.format.bytes(-(-slot.numel // size))
    seconds = max(0.0, after.seconds - before.seconds)
    return Again(blocks=blocks, seconds=seconds, lanes=dict(lanes), fetched=dict(fetched))
