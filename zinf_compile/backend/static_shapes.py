"""Specialises a graph that Dynamo captured with dynamic sizes to the sizes of this call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def with_static_shapes(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return a captured graph's inputs with their current sizes, on which Dynamo then guards.

    The number of chunks of a loss is part of a graph: graphs that chunk one are compiled for each number of tokens.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [_fixed(node, value) for node, value in zip(placeholders, inputs, strict=True)]


def _fixed(node: fx.Node, value: Any) -> Any:
    traced = node.meta.get("example_value")
    if isinstance(traced, torch.SymInt):
        return int(traced)
    if not isinstance(traced, torch.Tensor) or not any(isinstance(n, torch.SymInt) for n in (*traced.shape, *traced.stride())):
        return value
    sizes, strides = [int(n) for n in traced.shape], [int(n) for n in traced.stride()]
    mode: Any = traced.fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        fixed = torch.empty_strided(sizes, strides, dtype=traced.dtype, device=traced.device)
    return fixed.requires_grad_(traced.requires_grad)
