"""Memory of the values that compute makes, region by region, operator by operator: an upper bound for compiled regions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.passes.graph.token_loop import TokenLoop, is_token_loop

from .region_facts import bytes_of_value, owners_of


def peak_of_regions(
    graph: fx.Graph,
    regions: Sequence[Sequence[fx.Node]],
    owners: Mapping[fx.Node, fx.Node],
    *,
    without: Collection[fx.Node],
) -> list[int]:
    """Return for each region the peak bytes of the values that the graph has made and still reads, or returns.

    `owners` are those of `owners_of`. Values `without` don't count: they are in another account. Nor do units, reduced gradients
    and the graph's inputs.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = defaultdict(int)
    for node, number in place.items():
        last[owners[node]] = max(last[owners[node]], number, *(place[user] for user in node.users))
    dying: dict[int, list[fx.Node]] = defaultdict(list)
    for owner, end in last.items():
        dying[end].append(owner)
    region_of = {node: number for number, nodes in enumerate(regions) for node in nodes}
    peaks = [0] * len(regions)
    live, current = 0, 0
    held: dict[fx.Node, int] = {}
    inside: dict[TokenLoop, int] = {}
    for node, number in place.items():
        current = region_of.get(node, current)
        if _is_made(node) and owners[node] is node and node not in without:
            held[node] = bytes_of_value(node.meta.get("val"))
            live += held[node]
        if peaks and node in region_of:
            peaks[current] = max(peaks[current], live + _of_slice(node, inside))
        for owner in dying[number]:
            live -= held.pop(owner, 0)
    return peaks


def _of_slice(node: fx.Node, known: dict[TokenLoop, int]) -> int:
    """Return the peak bytes of the values of one slice of a loop; 0 for another operator."""
    loop = node.target
    if not isinstance(loop, TokenLoop):
        return 0
    if loop not in known:
        graph = loop.body.graph
        known[loop] = max(peak_of_regions(graph, [list(graph.nodes)], owners_of(graph), without=()))
    return known[loop]


def _is_made(node: fx.Node) -> bool:
    if is_token_loop(node):  # each of its results is a node
        return False
    return node.op == "call_function" and (node.target not in SCHEDULE_OPS or node.target is ops.gather_rows)
