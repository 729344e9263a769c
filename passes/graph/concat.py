"""What a concatenation consists of."""

from __future__ import annotations

import torch
from torch import fx

from .node_facts import fake_value

Stretch = tuple[fx.Node, int, int]
"""A part, and the [start, end) of the whole that it is."""


def parts_of_cat(node: fx.Node) -> tuple[int, list[Stretch]]:
    """Return along which dimension a node of `aten.cat` puts its parts together, and where each one lies.

    The same value may be several parts. A vector without elements, which `cat` takes beside anything, is none.
    """
    tensors = node.args[0] if node.args else node.kwargs["tensors"]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(tensors, (list, tuple))
    assert isinstance(dim, int)
    rank = fake_value(node).dim()
    found: list[Stretch] = []
    start = 0
    for part in tensors:
        assert isinstance(part, fx.Node)
        value = fake_value(part)
        if not _is_nothing(value, rank):
            end = start + value.shape[dim]
            found.append((part, start, end))
            start = end
    return dim % rank, found


def _is_nothing(value: torch.Tensor, rank: int) -> bool:
    return value.dim() == 1 < rank and value.shape[0] == 0
