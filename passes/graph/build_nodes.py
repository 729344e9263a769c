"""Write operators into a graph whose values are fake, each with the fake value of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .node_facts import fake_mode_of, fake_value, unmark_region

aten = torch.ops.aten

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


class NodeBuilder:
    """Inserts operators before a node, or after it."""

    def __init__(self, graph: fx.Graph, place: fx.Node, *, after: bool = False, stage: str | None = None) -> None:
        """Build at `place`.

        Without a `stage`, operators are parts of what the node there does and take all its facts over. With one, "is_forward" or
        "is_backward", they are new: they share its source line alone, are called as their operator is, and the partitioner is
        told their stage.
        """
        self._graph = graph
        self._place = place
        self._after = after
        self._stage = stage
        self._last = place
        self._mode = fake_mode_of(place)
        self.first: fx.Node | None = None
        """The first operator inserted since this was last set to None."""

    def __call__(
        self,
        target: Any,
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        like: fx.Node | None = None,
        name: str | None = None,
        **named: Any,
    ) -> fx.Node:
        """Insert one operator; it says of itself what `like` does, by default the node that it is put beside."""
        origin = like or self._place
        if name is None and self._stage is not None and isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.split("::")[-1].lstrip("_")
        with self._graph.inserting_after(self._last) if self._after else self._graph.inserting_before(self._place):
            self._last = node = new_node(self._graph, self._mode, target, args, {**(kwargs or {}), **named}, name)
        if self._stage is None:
            _take_facts(node, origin)
        else:
            node.meta["partitioner_tag"] = self._stage
            node.stack_trace = origin.stack_trace
        self.first = self.first or node
        return node

    def view(self, source: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Return the source in another shape, copied where it doesn't lie in memory so; itself where it has that shape."""
        if list(fake_value(source).shape) == list(shape):
            return source
        if source.target is aten.view.default and list(source.args[0].meta["val"].shape) == list(shape):  # type: ignore[union-attr]
            return source.args[0]  # type: ignore[return-value]
        if not _can_view(fake_value(source), shape):
            source = self(aten.clone.default, source, memory_format=torch.contiguous_format)
        return self(aten.view.default, source, list(shape))

    def cast(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the source in a data type; itself where it is of that one."""
        if fake_value(source).dtype == dtype:
            return source
        return self(torch.ops.prims.convert_element_type.default, source, dtype)

    def zeros(self, shape: Sequence[int], like: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return zeros."""
        return self(aten.full.default, list(shape), 0, dtype=dtype, device=fake_value(like).device)


def _take_facts(node: fx.Node, origin: fx.Node) -> None:
    node.meta.update((key, value) for key, value in origin.meta.items() if key not in _OWN)
    unmark_region(node)
    if "recompute" in origin.meta:  # what torch.utils.checkpoint decided of the whole counts for its parts
        node.meta["recompute"], node.meta["ac_graph_id"] = origin.meta["recompute"], origin.meta.get("ac_graph_id", 0)


def _can_view(value: torch.Tensor, shape: Sequence[int]) -> bool:
    try:
        value.view(list(shape))
    except (RuntimeError, ValueError):
        return False
    return True
