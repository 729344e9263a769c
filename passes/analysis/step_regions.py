"""Regions of a graph whose gathers are just in time, and what its units do there. `step_problem` and passes that act out a plan
number regions alike: those that `align_regions` marked, in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.passes.graph.node_facts import group_of, positions, starts_region


@dataclasses.dataclass(frozen=True, slots=True)
class Residence:
    """A stay of one unit on the device: what lies between a gather and its release."""

    gather: fx.Node
    release: fx.Node
    due: int
    """The first region that may read it."""
    until: int
    """The region behind the last one."""

    @property
    def group(self) -> int:
        """Return the group that the unit is gathered with."""
        return group_of(self.gather)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphRegions:
    """One graph by regions."""

    compute: tuple[tuple[fx.Node, ...], ...]
    """The operators of each region, without transfers."""
    residences: tuple[Residence, ...]
    """In the order of gathers."""
    reductions: tuple[tuple[fx.Node, int], ...]
    """Reduce-scatters, each with the region that completes its gradient."""

    @property
    def count(self) -> int:
        """Return the number of regions."""
        return len(self.compute)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of a graph in a step."""

    graph: fx.Graph
    regions: GraphRegions
    name: str
    first: int
    """The number of its first region in the step."""
    pair: int
    """The number of the forward and backward that it is one of."""
    micro_batch: int
    is_backward: bool


def find_regions(graph: fx.Graph) -> GraphRegions:
    """Return the regions of a graph that `align_regions` has seen. What it computes before the first mark belongs to region 0."""
    compute: list[list[fx.Node]] = [[]]
    marks = 0
    due: dict[fx.Node, int] = {}
    residences: dict[fx.Node, Residence] = {}
    reductions: list[tuple[fx.Node, int]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if starts_region(node):
            marks += 1
            if marks > 1:
                compute.append([])
        if node.target is ops.all_gather:
            due[node] = marks
        elif node.target is ops.release:
            gather = node.args[0].args[0]
            residences[gather] = Residence(gather, node, due[gather], max(marks, due[gather] + 1))
        elif node.target is ops.reduce_scatter:
            reductions.append((node, max(0, marks - 1)))
        elif node.op != "get_attr" and (node.target not in SCHEDULE_OPS or node.target is ops.gather_rows):
            compute[-1].append(node)
    last = max(0, len(compute) - 1)
    found = [residences[gather] for gather in due if gather in residences]
    assert all(each.due <= last for each in found), "a gather behind all regions is of no use"
    return GraphRegions(tuple(map(tuple, compute)), tuple(found), tuple(reductions))


def least_of_regions(graph: fx.Graph, rows: Sequence[int]) -> list[int]:
    """Return for each region, with the transfers in front of it and behind it, the least of the numbers that all nodes have."""
    regions, place = find_regions(graph).compute, positions(graph)
    first = [place[nodes[0]] if nodes else 0 for nodes in regions]
    ends = [place[nodes[-1]] + 1 if nodes else 0 for nodes in regions]
    return [min(rows[start:end], default=0) for start, end in zip([0, *ends[:-1]], [*first[1:], len(rows)], strict=True)]


def region_starts(graph: fx.Graph) -> Sequence[fx.Node]:
    """Return the first operator of each region, before which nothing of it runs."""
    return [node for node in graph.nodes if starts_region(node)]


def transfers_before(start: fx.Node, kinds: Collection[object]) -> fx.Node:
    """Return the first of the transfers right before a region that is of one of these kinds, or what the region begins with."""
    found = place = start
    while place.prev.op == "get_attr" or place.prev.target in (ops.swap_in, ops.all_gather, ops.wait, ops.set_random_state):
        place = place.prev
        if place.target in kinds:
            found = place
    return found
