"""The compute of a scheduled graph between two transfers, as it is compiled: transfers go in between and cut none in two."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from torch import fx

from zinf_compile.ir.op_spec import SPECS
from zinf_compile.passes.graph.node_facts import positions, starts_region


class Stretches:
    """The stretches of a graph in order, numbered; as they are before the caller inserts anything."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: Sequence[Sequence[fx.Node]] = _find(graph)
        place = positions(graph)
        self._ends = [place[nodes[-1]] for nodes in self.nodes]
        self._place = place

    def of(self, node: fx.Node) -> int:
        """Return the stretch that a node is in, or the next one behind it; their number where none is."""
        return bisect.bisect_left(self._ends, self._place[node])

    def contains(self, node: fx.Node) -> bool:
        """Say whether a node is in its stretch, rather than before it."""
        number = self.of(node)
        return number < len(self.nodes) and self._place[node] >= self._place[self.nodes[number][0]]


def _find(graph: fx.Graph) -> list[list[fx.Node]]:
    found: list[list[fx.Node]] = []
    goes_on = False
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        spec = SPECS.get(node.target)
        if spec is not None and spec.step is not None:
            goes_on = False
            continue
        if not goes_on or starts_region(node):
            found.append([])
        found[-1].append(node)
        goes_on = True
    return found
