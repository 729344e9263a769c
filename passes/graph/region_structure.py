"""A key of a graph's structure: regions with equal keys compile as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def structure(region: fx.GraphModule) -> tuple[Any, ...]:
    """Return a key of a region's structure: operators, dataflow, and the metadata of its tensors."""
    number: dict[fx.Node, int] = {}
    key: list[Any] = []
    for node in region.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            key.append(_form(node.meta.get("val")))
        elif node.op == "get_attr":
            key.append(("attribute", str(node.target)))
        else:
            wired = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
            key.append((node.op, str(node.target), repr(wired), _form(node.meta.get("val"))))
    return tuple(key)


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(value.device), str(tuple(value.shape)), str(tuple(value.stride())))
    if isinstance(value, (list, tuple)):
        return tuple(_form(item) for item in value)
    return repr(value)
