"""Calls on parameters whose own memory is hollow: one handling for partitioned parameters and for materializing ones.

`parameter_calls` and `init.materializing` call it; each of them knows where values are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zinf_compile._torch import tree_map


def answer_assignment(
    name: str,
    args: Sequence[Any],
    parameter: nn.Parameter,
    *,
    assign: Callable[[torch.Tensor], None],
    check: Callable[[torch.Tensor], None] | None = None,
) -> Any:
    """Answer `parameter.data = value`, and the call by which `Module.to()` asks whether it may; `NotImplemented` for others.

    `assign` performs it. `check` raises where a value can't be assigned; None: any can. A parameter's own data changes nothing.
    """
    if name == "__set__" and args[0] is parameter:
        if args[1] is not parameter:
            assign(args[1])
        return None
    if name == "_has_compatible_shallow_copy_type":
        if check is not None and args[1] is not args[0]:
            check(args[1])
        return True
    return NotImplemented


def call_on_values(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Sequence[tuple[nn.Parameter, torch.Tensor]],
) -> Any:
    """Call `func` with the whole values of parameters in their place; return the parameter where it returns a value itself."""
    by_id = {id(parameter): value for parameter, value in values}

    def value_of(item: Any) -> Any:
        return by_id.get(id(item), item) if isinstance(item, nn.Parameter) else item

    result = func(*tree_map(value_of, tuple(args)), **tree_map(value_of, dict(kwargs)))
    return next((parameter for parameter, value in values if result is value), result)
