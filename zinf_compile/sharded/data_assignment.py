"""Changes of parameters whose values are on this process: arguments that a call changes, and `parameter.data = value`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf_compile._torch import no_torch_function, tree_leaves
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.units.unit import Unit

from .call_names import call_name

_RESHAPES = frozenset(
    [
        "as_strided_",
        "rename_",
        "resize_",
        "resize_as_",
        "set_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    ]
)
"""In-place functions that change what a tensor is, not its values."""

AUGMENTED = frozenset(
    f"__i{name}__"
    for name in ("add", "and", "div", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
)
"""Methods of augmented assignments."""


def changed_parameters(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return what a call of this name changes in place: its first argument, or all of a list, and `out`."""
    changed = tree_leaves(kwargs["out"]) if kwargs.get("out") is not None else []
    in_place = name in AUGMENTED or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return [*tree_leaves(args[0]), *changed] if in_place and args else changed


def reject_reshape(func: Callable[..., Any], unit: Unit) -> None:
    """Raise `PartitionedParameterError` for a function that would change what the parameter is: graphs are compiled for it."""
    if getattr(func, "__name__", "") in _RESHAPES:
        raise PartitionedParameterError(
            f"{call_name(func)} would change the shape or the memory of parameter {unit.name}, which is partitioned as "
            f"{list(unit.shape)} {unit.dtype}: do that before the model's first compiled call. `parameter.data = value` takes "
            "over a tensor of the same shape, type and device"
        )


def assign(unit: Unit, value: torch.Tensor) -> None:
    """Let the parameter of `unit`, which is at hand, take over the memory of `value`: same shape, type and device.

    As in eager PyTorch, what was taken from `parameter.data` before keeps its values, and later changes of `value` are changes
    of the parameter: loops swap weights in this way, and back. It becomes a copy in the parameter's order of dimensions where
    `value` lies in memory in another one, is of a subclass, or was made in inference mode.
    """
    with torch.inference_mode(False), torch.no_grad(), no_torch_function():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_inference() and value.stride() == unit.stride:
            unit.replace(unit.flat(value.detach()))
        else:
            own = torch.empty_strided(unit.shape, unit.stride, dtype=unit.dtype, device=unit.device)
            unit.replace(unit.flat(own.copy_(value)))


def replaced(target: torch.Tensor, value: Any, what: str) -> torch.Tensor:
    """Return what a tensor that is partitioned becomes by `target.data = value`: one like it, in memory of its own.

    As in eager PyTorch, what was taken from it before keeps its values. `what` names it in the `PartitionedParameterError` for a
    value of another shape, type or device.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what}.data = {type(value).__name__}: accepted is a tensor")
    if (value.shape, value.dtype, value.device) != (target.shape, target.dtype, target.device):
        raise PartitionedParameterError(
            f"{what} is partitioned as {list(target.shape)} {target.dtype} on {target.device}; assigning data "
            f"({list(value.shape)} {value.dtype} on {value.device}) is not possible: give it a tensor of the same shape, type "
            "and device"
        )
    with torch.inference_mode(False), torch.no_grad():
        return target.detach().clone().copy_(value.detach())
