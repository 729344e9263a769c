"""Parts of a concatenation."""

from __future__ import annotations

import torch
from torch import fx

from .node_facts import fake_value

Part = tuple[fx.Node, int, int]
"""A concatenated value and its [start, end) in the result."""


def parts_of_cat(node: fx.Node) -> tuple[int, list[Part]]:
    """Return the dimension of an `aten.cat` and its parts in order.

    A value may occur several times. Empty vectors, which `cat` accepts next to any shape, are not among the parts.
    """
    tensors = node.args[0] if node.args else node.kwargs["tensors"]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(tensors, (list, tuple))
    assert isinstance(dim, int)
    rank = fake_value(node).dim()
    found: list[Part] = []
    start = 0
    for part in tensors:
        assert isinstance(part, fx.Node)
        value = fake_value(part)
        if not _is_empty_vector(value, rank):
            end = start + value.shape[dim]
            found.append((part, start, end))
            start = end
    return dim % rank, found


def _is_empty_vector(value: torch.Tensor, rank: int) -> bool:
    return value.dim() == 1 < rank and value.shape[0] == 0
