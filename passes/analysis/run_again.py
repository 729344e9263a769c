"""What it takes that compute of a forward runs again in its backward: seconds, and what is gathered for it once more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from zinf_compile.ir.forward_compute import Again
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.graph.node_facts import slot_behind, wire_format

from .region_facts import owners_of
from .step_facts import StepFacts
from .step_problem import seconds_of_region
from .step_regions import find_regions


def cost_again(
    before: Sequence[fx.Graph],
    after: Sequence[fx.Graph],
    facts: StepFacts,
    members: Mapping[str, Sequence[ParameterSlot]],
    *,
    blocks: int,
) -> Again:
    """Return what `blocks` take that run again in the graphs `after`, and don't in those `before`.

    Graphs are as `region_passes` leave them. `members`: the slots of each unit by its name, of the problem that is solved.
    """
    unit_of = {slot.name: name for name, slots in members.items() for slot in slots}
    lanes: dict[str, float] = defaultdict(float)
    fetched: dict[str, int] = defaultdict(int)
    size = facts.world_size
    between = [link for link in facts.links if link.source is None]
    for slot, sent in (_gathered(after) - _gathered(before)).elements():
        for link in between:
            lanes[link.on_lane] += link.seconds((size - 1) * -(-sent // size))
        if slot.name in unit_of:
            fetched[unit_of[slot.name]] += slot.format.bytes(-(-slot.numel // size))
    seconds = _seconds(after, facts) - _seconds(before, facts)
    return Again(blocks=blocks, seconds=max(0.0, seconds), lanes=dict(lanes), fetched=dict(fetched))


def _gathered(graphs: Sequence[fx.Graph]) -> Counter[tuple[ParameterSlot, int]]:
    """Return how often each parameter is gathered, with the bytes of it as it is sent."""
    stays = [stay for graph in graphs for stay in find_regions(graph).residences]
    slots = ((slot_behind(stay.gather), wire_format(stay.gather)) for stay in stays)
    return Counter((slot, form.bytes(slot.numel)) for slot, form in slots)


def _seconds(graphs: Sequence[fx.Graph], facts: StepFacts) -> float:
    return sum(
        seconds_of_region(nodes, owners, facts)
        for graph in graphs
        for owners in (owners_of(graph),)
        for nodes in find_regions(graph).compute
    )
