"""Insertion of operators into a traced graph, each with the fake value of its result.

All passes create their nodes here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .node_facts import fake_mode_of, fake_value, unmark_region

aten = torch.ops.aten

_OWN = ("val", "tensor_meta", "desc", "recompute", "ac_graph_id")
"""Keys of `node.meta` that describe the node's own result. The others describe its origin in the user's program."""


def new_node(
    graph: fx.Graph, mode: Any, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str | None
) -> fx.Node:
    """Create an operator at the graph's insertion point and compute its fake value under `mode`."""
    node = graph.create_node("call_function", target, args, dict(kwargs), name=name)
    values, named = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = target(*values, **named)
    return node


def new_move(
    graph: fx.Graph, mode: Any, target: Any, args: tuple[Any, ...], name: str, like: torch.Tensor | Sequence[torch.Tensor]
) -> fx.Node:
    """Create an operator whose result is `like` in memory of its own, as a saved value's is that has moved.

    Its fake value is made without running the operator: large models have thousands of them.
    """
    node = graph.create_node("call_function", target, args, name=name)
    with mode:
        node.meta["val"] = _in_own_memory(like) if isinstance(like, torch.Tensor) else [_in_own_memory(each) for each in like]
    return node


def _in_own_memory(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class NodeBuilder:
    """Inserts operators before a node, or after it.

    Note: two kinds of new operators
        Without a `stage`, the operators decompose the node at `place` and inherit its metadata, but for its value. With a `stage`
        ("is_forward" or "is_backward") they are additional: they inherit the source line alone, take their operator's name, and
        carry the stage as the tag for the partitioner.
    """

    def __init__(self, graph: fx.Graph, place: fx.Node, *, after: bool = False, stage: str | None = None) -> None:
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
        """Insert one operator with the metadata of `like`, by default of the node at `place`."""
        origin = like or self._place
        if name is None and self._stage is not None and isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.split("::")[-1].lstrip("_")
        with self._graph.inserting_after(self._last) if self._after else self._graph.inserting_before(self._place):
            self._last = node = new_node(self._graph, self._mode, target, args, {**(kwargs or {}), **named}, name)
        if self._stage is None:
            _copy_metadata(node, origin)
        else:
            node.meta["partitioner_tag"] = self._stage
            node.stack_trace = origin.stack_trace
        self.first = self.first or node
        return node

    def view(self, source: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Return the source in `shape`: itself if it has that shape, else a view, copied first where strides forbid a view."""
        if list(fake_value(source).shape) == list(shape):
            return source
        if source.target is aten.view.default and list(source.args[0].meta["val"].shape) == list(shape):  # type: ignore[union-attr]
            return source.args[0]  # type: ignore[return-value]
        if not can_view(fake_value(source), shape):
            source = self(aten.clone.default, source, memory_format=torch.contiguous_format)
        return self(aten.view.default, source, list(shape))

    def cast(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the source in `dtype`: itself if it has that type, else a cast."""
        if fake_value(source).dtype == dtype:
            return source
        return self(torch.ops.prims.convert_element_type.default, source, dtype)

    def zeros(self, shape: Sequence[int], like: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return zeros in `shape` and `dtype`, on the device of `like`."""
        return self(aten.full.default, list(shape), 0, dtype=dtype, device=fake_value(like).device)


def _copy_metadata(node: fx.Node, origin: fx.Node) -> None:
    node.meta.update((key, value) for key, value in origin.meta.items() if key not in _OWN)
    unmark_region(node)
    if "recompute" in origin.meta:  # decisions of torch.utils.checkpoint hold for the parts
        node.meta["recompute"], node.meta["ac_graph_id"] = origin.meta["recompute"], origin.meta.get("ac_graph_id", 0)


def can_view(value: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether a value's strides allow a view in another shape."""
    try:
        value.view(list(shape))
    except (RuntimeError, ValueError):
        return False
    return True
