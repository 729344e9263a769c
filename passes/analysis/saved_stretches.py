"""The stretches of a forward and its backward in which all that may leave does, and between which of them each memory is away.

`backend/saved_choices` calls it: what `plan/saved_schedule` chooses transfers by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.passes.graph.node_facts import positions, values_behind

from .region_facts import owners_of
from .step_facts import StepFacts
from .step_problem import seconds_of_region
from .stretches import Stretches


def stretch_seconds(graph: fx.Graph, facts: StepFacts) -> list[float]:
    """Return the seconds of each stretch of a scheduled graph."""
    owners = owners_of(graph)
    return [seconds_of_region(tuple(nodes), owners, facts) for nodes in Stretches(graph).nodes]


def least_of_stretches(graph: fx.Graph, rows: Sequence[int]) -> list[int]:
    """Return for each stretch, with the transfers in front of it, the least of the numbers that a graph's nodes have."""
    place, nodes = positions(graph), Stretches(graph).nodes
    starts = [0, *(place[before[-1]] + 1 for before in nodes[:-1])]
    ends = [*starts[1:], len(rows)]
    return [min(rows[start:end]) for start, end in zip(starts, ends, strict=True)] if nodes else []


def away_between(forward: fx.Graph, backward: fx.Graph, memories: Sequence[SavedMemory]) -> Mapping[str, tuple[int, int]]:
    """Return by name the stretch that uses each memory last in the forward, and the one that uses it first in the backward.

    Memory that the backward doesn't read is left out.
    """
    names = {name: memory.name for memory in memories for name in memory.inputs}
    left: dict[str, int] = {}
    stretches = Stretches(forward)
    for node in forward.nodes:
        if node.target is ops.swap_values_out and not isinstance(node.args[0], fx.Node):
            left |= {names[value.name]: stretches.of(node) - 1 for value in values_behind(node) if value.name in names}
    due: dict[str, int] = {}
    stretches = Stretches(backward)
    for node in backward.nodes:
        if node.target is ops.wait_value:
            for value in values_behind(node):
                if value.name in names:
                    due.setdefault(names[value.name], stretches.of(node))
    return {name: (left[name], due[name]) for name in left if name in due}
