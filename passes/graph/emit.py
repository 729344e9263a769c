"""New operators of a graph, with what they make of fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from .node_facts import fake_mode_of, unmark_region

_OWN = ("val", "tensor_meta", "desc", "recompute", "ac_graph_id")
"""What a node's record says of itself; the rest says where in the user's program it comes from."""


def new_node(
    graph: fx.Graph, mode: Any, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str | None
) -> fx.Node:
    """Write an operator where the graph inserts now, with its result on fake tensors of `mode`."""
    node = graph.create_node("call_function", target, args, dict(kwargs), name=name)
    values, named = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = target(*values, **named)
    return node


class Emitter:
    """Puts operators in front of a node, or behind it, as parts of what that node does."""

    def __init__(self, graph: fx.Graph, place: fx.Node, *, behind: bool = False) -> None:
        self._graph = graph
        self._behind = behind
        self._last = place
        self._place = place
        self._mode = fake_mode_of(place)

    def __call__(
        self,
        target: Any,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        like: fx.Node | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """Add one; it says of itself what `like` does, by default the node that it is put in front of."""
        origin = like or self._place
        with self._graph.inserting_after(self._last) if self._behind else self._graph.inserting_before(self._place):
            self._last = node = new_node(self._graph, self._mode, target, args, kwargs or {}, name)
        node.meta.update((key, value) for key, value in origin.meta.items() if key not in _OWN)
        unmark_region(node)
        if "recompute" in origin.meta:  # what torch.utils.checkpoint decided of the whole counts for its parts
            node.meta["recompute"], node.meta["ac_graph_id"] = origin.meta["recompute"], origin.meta.get("ac_graph_id", 0)
        return node
