"""Write operators into a graph whose values are fake, one call each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .emit import new_node
from .node_facts import fake_mode_of, fake_value

aten = torch.ops.aten


class Inserter:
    """Inserts operators in front of `place`, each with the fake value of its result, as if the user's line had made them."""

    def __init__(self, graph: fx.Graph, place: fx.Node, *, like: fx.Node, backward: bool = False) -> None:
        self._graph = graph
        self._place = place
        self._like = like
        self._tag = "is_backward" if backward else "is_forward"
        self.first: fx.Node | None = None
        """The first operator inserted since this was last set to None."""

    def __call__(self, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        """Insert one operator."""
        if name is None and isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.split("::")[-1].lstrip("_")
        with self._graph.inserting_before(self._place):
            node = new_node(self._graph, fake_mode_of(self._like), target, args, kwargs, name)
        node.meta["partitioner_tag"] = self._tag
        node.stack_trace = self._like.stack_trace
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


def _can_view(value: torch.Tensor, shape: Sequence[int]) -> bool:
    try:
        value.view(list(shape))
    except (RuntimeError, ValueError):
        return False
    return True
