"""Minimum device memory of a graph's schedule. The backend calls it; the plan budgets with its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP, SCHEDULE_OPS
from zinf_compile.ir.row_rounds import rows_on_their_way
from zinf_compile.ir.tiers import Tier, Topology
from zinf_compile.passes.graph.node_facts import (
    Counts,
    counts_all,
    group_of,
    is_collective,
    reduced_at_step,
    slot_behind,
    wire_bytes,
    wire_format,
    wire_type,
)
from zinf_compile.passes.verify import gathered_changes, peak_of
from zinf_compile.plan.graph_plan import GraphMemory

from .gather_stages import find_stages, peak_ahead, stage_bytes


def measure_needs(graph: fx.Graph, *, counts: Counts = counts_all) -> GraphMemory:
    """Measure the bytes of one graph: before `prefetch` the minimum, after it those of the final schedule.

    `counts` says which gathers take memory.
    """
    return TransferNeeds(graph).memory(counts)


class TransferNeeds:
    """What the transfers of a graph need, whichever gathers take memory. The graph must not change any more."""

    def __init__(self, graph: fx.Graph) -> None:
        self._changes = gathered_changes(graph)
        self._names = {node.name: slot_behind(node).name for node, change in self._changes if change > 0}
        self._others = _measure_others(graph)

    def memory(self, counts: Counts) -> GraphMemory:
        """Return it where those gathers do."""
        gathered, where = peak_of(self._changes, counts)
        return dataclasses.replace(self._others, gathered=gathered, largest=self._names.get(where, ""))


def _measure_others(graph: fx.Graph) -> GraphMemory:
    """Measure all but what is gathered: no bytes and no name stand for that."""
    last_group = LONE_GROUP
    left = reduced = together = under_way = last = converting = converted = 0
    for node in graph.nodes:
        if node.target is ops.reduce_scatter:
            own = slot_behind(node).bytes if wire_type(node) != slot_behind(node).dtype else 0
            converting += own
            converted = max(converted, converting)
            if reduced_at_step(node):  # among the gradients that are held
                continue
            if not together:
                under_way = last
            together += wire_bytes(node) + own
            group = group_of(node)
            last = last + wire_bytes(node) if group == last_group != LONE_GROUP else wire_bytes(node)
            last_group = group
            left, reduced = max(left, together), max(reduced, together + under_way)
        elif node.target not in SCHEDULE_OPS:
            together = converting = 0
    gathers = [node for node in graph.nodes if node.target is ops.all_gather]
    narrow = [wire_bytes(node) for node in gathers if wire_type(node) != slot_behind(node).dtype]
    widening = max(
        (slot_behind(node).format.bytes_per_element / wire_format(node).bytes_per_element for node in gathers), default=1.0
    )
    return GraphMemory(
        gathered=0,
        rows=max((rows_on_their_way(slot_behind(node)) for node in graph.nodes if node.target is ops.gather_rows), default=0),
        largest="",
        narrowed=bool(narrow),
        widening=widening,
        cast=max(narrow, default=0),
        converted=converted,
        left=left,
        reduced=reduced,
    )


def measure_ahead(graph: fx.Graph, *, stages: int, counts: Counts = counts_all) -> int:
    """Return the peak of gathered bytes of a just-in-time graph if each gather starts `stages` stages ahead of its use."""
    groups, released = find_stages(graph, counts=counts)
    return peak_ahead([stage_bytes(group, counts) for group in groups], released, stages=stages)


def measure_one_ahead(
    graph: fx.Graph, homes: Collection[Tier], topology: Topology, *, look_ahead: int, counts: Counts = counts_all
) -> tuple[int, int]:
    """Return the bytes gathered, and gathered or in flight, of a schedule bounded by nothing but `look_ahead`.

    The largest unit of these `homes` is loaded that far ahead of its use, too; more memory would not be used.
    """
    # one read to a device that is host memory takes the place of two hops
    hops = max((len(topology.hops(home)) + topology.reads_at_once(home) for home in homes), default=0)
    gathered = measure_ahead(graph, stages=look_ahead, counts=counts)
    return gathered, measure_ahead(graph, stages=look_ahead * max(1, hops), counts=counts)


def ahead_key(graph: fx.Graph) -> Hashable:
    """Return a key of the graph's collectives, independent of the shapes of its inputs."""
    moves = [node for node in graph.nodes if is_collective(node)]
    return tuple((str(n.target), slot_behind(n).name, slot_behind(n).shape, wire_type(n), group_of(n)) for n in moves)
