"""Dependencies of a schedule as a networkx graph: nodes are transfers, waits, releases and regions of compute.

`zinf dump --format dot` and tests call it. Nothing runs from it: the executor performs the schedule in the order of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import networkx as nx
from torch import fx

from zinf_compile.errors import IllegalGraphError
from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import COPY_IN, COPY_OUT, GATHER, LONE_GROUP, READ, REDUCE, SCHEDULE_OPS, WRITE, has_unit
from zinf_compile.passes.graph.node_facts import group_of, slot_behind, starts_region, values_behind

from .region_facts import bytes_of_region, operations_of, owners_of, type_of
from .traffic import bytes_moved, is_swap, lane_of

COMPUTE = "compute"
_COLOURS = {
    COMPUTE: "white",
    GATHER: "lightblue",
    REDUCE: "lightsalmon",
    READ: "palegreen",
    COPY_IN: "lightcyan",
    COPY_OUT: "mistyrose",
    WRITE: "khaki",
}


def build_transfer_graph(graph: fx.Graph, *, world_size: int) -> nx.DiGraph:
    """Build the transfer graph of one rank of `world_size`; raise `IllegalGraphError` if it has a cycle.

        graph:  g = all_gather(w);  v = wait(g);  t = t(v);  a = mm(x, t);  release(v);  r = reduce_scatter(a, w)
        nodes:  g, v, t (the region t, mm), release(v), r
        edges:  g -> v -> t -> release(v),  v -> release(v),  t -> r,  release(v) -> r

    A node has the name of its first operator in the graph's text, a `lane` (compute, gather, reduce, read, copy in, copy out or
    write), a `label`, `bytes`, and of regions their `operations` by data type. The bytes of a transfer are those that the rank
    moves, for all members of its group. The bytes of a region are its inputs and outputs, each memory once, dynamic sizes as 0.
    Waits and releases have 0.

    An edge's `kind` is `data` or `order`. Order edges join neighbours on a lane, and the latest node on the compute lane with
    the transfer issued after it.
    """
    found: nx.DiGraph = nx.DiGraph()
    name_of: dict[fx.Node, str] = {}
    latest: dict[str, str] = {}
    regions: dict[str, list[fx.Node]] = {}
    for node, name, lane in _named(graph):
        name_of[node] = name
        if name not in found:
            found.add_node(name, lane=lane, bytes=0, label="")
        if node.target in SCHEDULE_OPS:
            _describe(found.nodes[name], node, world_size=world_size)
        else:
            regions.setdefault(name, []).append(node)
        for source in node.all_input_nodes:
            if name_of.get(source, name) != name:
                found.add_edge(name_of[source], name, kind="data")
        for on in (lane, COMPUTE):
            earlier = latest.get(on, name)
            if earlier != name and not found.has_edge(earlier, name):
                found.add_edge(earlier, name, kind="order")
        latest[lane] = name
    owners = owners_of(graph)
    for name, nodes in regions.items():
        count = f"{len(nodes)} operators" if len(nodes) > 1 else "1 operator"
        operations: dict[str, int] = {}
        for node in nodes:
            if done := operations_of(node):
                dtype = str(type_of(node)).removeprefix("torch.")
                operations[dtype] = operations.get(dtype, 0) + done
        found.add_node(name, label=f"{name}: {count}", bytes=bytes_of_region(nodes, owners), operations=operations)
    _check_acyclic(found)
    return found


def add_seconds(transfers: nx.DiGraph, seconds: Callable[[str, int, Mapping[str, int]], float]) -> nx.DiGraph:
    """Give each node its `seconds`, of its lane, its bytes and its operations by data type; return the graph."""
    for _, facts in transfers.nodes.items():
        facts["seconds"] = seconds(facts["lane"], facts["bytes"], facts.get("operations", {})) if facts["bytes"] else 0.0
    return transfers


def find_critical_path(transfers: nx.DiGraph, *, weight: str = "bytes") -> list[str]:
    """Return the path with the most bytes, or `seconds` once they were added, first to last.

    A lower bound that no overlap of the lanes can shorten: a lane performs its transfers in the order of the schedule.
    """
    reached: dict[str | None, float] = {None: 0}
    before: dict[str, str | None] = {}
    for node in nx.topological_sort(transfers):
        before[node] = max(transfers.predecessors(node), key=reached.__getitem__, default=None)
        reached[node] = transfers.nodes[node][weight] + reached[before[node]]
    path: list[str] = []
    last = max(reached, key=reached.__getitem__)
    while last is not None:
        path.append(last)
        last = before[last]
    return path[::-1]


def transfer_dot(graphs: Sequence[tuple[str, nx.DiGraph]]) -> str:
    """Write titled transfer graphs as one DOT graph, for `dot -Tsvg`: order dashed, critical paths bold."""
    lines = ["digraph zinf {", "  rankdir=LR;", "  node [shape=box, style=filled];"]
    for number, (title, transfers) in enumerate(graphs):
        path = find_critical_path(transfers)
        bold_nodes, bold_edges = set(path), set(itertools.pairwise(path))
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(title)};"]
        for node, facts in transfers.nodes.items():
            label = f"{facts['label']}\n{facts['bytes']:,} B" if facts["bytes"] else facts["label"]
            look = f"fillcolor={_COLOURS[facts['lane']]}" + (", penwidth=3" if node in bold_nodes else "")
            lines.append(f"    {_quoted(f'{number} {node}')} [label={_quoted(label)}, {look}];")
        for source, target in transfers.edges:
            look = "style=dashed" if transfers.edges[source, target]["kind"] == "order" else "style=solid"
            look += ", penwidth=3" if (source, target) in bold_edges else ""
            lines.append(f"    {_quoted(f'{number} {source}')} -> {_quoted(f'{number} {target}')} [{look}];")
        lines.append("  }")
    return "\n".join([*lines, "}"])


def _named(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, str]]:
    groups: dict[tuple[str, int], str] = {}
    region = ""
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node.target is ops.reduce_buffer:
            continue
        lane = lane_of(node) or COMPUTE
        if node.target not in SCHEDULE_OPS:
            region = node.name if starts_region(node) else region or node.name
            yield node, region, lane
            continue
        region = ""
        name = f"release({node.args[0]})" if node.target is ops.release else node.name
        if lane != COMPUTE and group_of(node) != LONE_GROUP:
            name = groups.setdefault((lane, group_of(node)), name)
        yield node, name, lane


def _describe(facts: dict[str, Any], node: fx.Node, *, world_size: int) -> None:
    if facts["lane"] != COMPUTE:
        facts["bytes"] += bytes_moved(node, world_size=world_size)
    if values := values_behind(node):
        what = str(node.target).split(".")[1] if facts["lane"] == COMPUTE else facts["lane"]
        facts["label"] = f"{what} {', '.join(value.name for value in values)}"
        return
    if not has_unit(node.target):
        facts["label"] = str(node.target).split(".")[1]
        return
    operator = facts["lane"] if is_swap(node) else str(node.target).split(".")[1]
    facts["label"] = f"{facts['label']}\n{slot_behind(node).name}" if facts["label"] else f"{operator} {slot_behind(node).name}"


def _check_acyclic(found: nx.DiGraph) -> None:
    if nx.is_directed_acyclic_graph(found):
        return
    cycle = [source for source, _ in nx.find_cycle(found)]
    raise IllegalGraphError(
        "illegal schedule (a defect of zinf-compile, please report it): each operator waits for the one before, in a cycle: "
        + " -> ".join([*cycle, cycle[0]])
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
