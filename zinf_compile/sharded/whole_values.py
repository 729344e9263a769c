"""Calls that need the whole value of a parameter off the device, on one process: it is loaded for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zinf_compile._torch import tree_leaves, tree_map

from .offloaded_value import value_of
from .tensor import ShardedTensor, reads_memory


def on_whole_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` on values that are loaded when they are read; `NotImplemented` where a partitioned tensor is no parameter's.

    Only parameters of one rank alone have whole values here. Autograd does not reach the parameter through a loaded value, so
    calls that need a gradient are left to others.
    """
    found = [item for item in tree_leaves((args, kwargs)) if isinstance(item, ShardedTensor)]
    if torch.is_grad_enabled() and any(item.requires_grad for item in found):
        return NotImplemented
    if not all(item.is_parameter and item.unit.shard_group.size == 1 for item in found):
        return NotImplemented
    given, named = tree_map(_whole, tuple(args)), tree_map(_whole, dict(kwargs))
    name = getattr(func, "__name__", "")
    return getattr(given[0], name)(*given[1:], **named) if reads_memory(name) else func(*given, **named)


def _whole(item: Any) -> Any:
    if not isinstance(item, ShardedTensor):
        return item
    value = value_of(item.unit)
    same = tuple(item.shape) == tuple(value.shape) and item.stride() == value.stride()
    return value if same else torch.as_strided(value, item.shape, item.stride())
