"""The type that a gradient shows, its parameter's, beside the one in which its shard is kept, and how arithmetic keeps both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zinf_compile.runtime.units.unit import Unit

from .gradient import ShardedGradient


def as_kept(value: Any, unit: Unit) -> Any:
    """Return a tensor of the parameter's type in that of its gradient's shard; anything else as it is."""
    return value.to(unit.reduce_dtype) if isinstance(value, torch.Tensor) and value.dim() and value.dtype == unit.dtype else value


def shown_types(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Return the types that results of an element-wise operator on shards show: those that it gives of the types shown to it."""
    values = [each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, (list, tuple)) else (value,))]
    if all(value.dtype == value.kept_dtype for value in values if hasattr(value, "kept_dtype")):
        return [result.dtype for result in results]

    def without_elements(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [without_elements(each) for each in value]
        if isinstance(value, torch.Tensor) and (value.dim() or hasattr(value, "kept_dtype")):
            return torch.zeros((0,) * bool(value.dim()), dtype=value.dtype, device=value.device)
        return value

    shown = func(*map(without_elements, args), **{name: without_elements(value) for name, value in kwargs.items()})
    return [each.dtype for each in (shown if isinstance(shown, (list, tuple)) else (shown,))]


def changed_by(func: Any, args: Sequence[Any]) -> ShardedGradient | None:
    """Return the gradient that an operator changes, where it is kept in another type than it shows."""
    changed: Any = args[0] if args and hasattr(func, "_schema") and func._schema.is_mutable else None
    return changed if hasattr(changed, "kept_dtype") and changed.dtype != changed.kept_dtype else None
