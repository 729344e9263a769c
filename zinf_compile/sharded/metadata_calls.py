"""Calls on partitioned parameters that need no value: those that read metadata, and conversions to what it is already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf_compile._torch import never_compile_alone
from zinf_compile.runtime.system.accelerator import moving_methods
from zinf_compile.runtime.units.unit import Unit

LIKE = frozenset(["empty_like", "full_like", "ones_like", "zeros_like"])
"""Functions that make a tensor like another."""

METADATA = LIKE | frozenset(
    [
        "size",
        "stride",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "element_size",
        "storage_offset",
        "untyped_storage",
        "get_device",
        "has_names",
        "type",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "__hash__",
        "__len__",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
        "result_type",
        "increment_version",
        "_increment_version",
    ]
)
"""Functions that read a parameter's metadata, never its value; `is_*` and `_is_*` besides."""

_READS_DESPITE_ITS_NAME = frozenset({"is_nonzero", "_is_all_true", "_is_any_true"})

_VALUE_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_CONVERSIONS = {
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64,
}  # fmt: skip


_PROPERTIES = vars(torch.Tensor.__base__)

OFTEN = frozenset(
    [
        torch.Tensor._is_view,
        torch.Tensor.__hash__,
        *(_PROPERTIES[name].__get__ for name in ("grad", "grad_fn", "requires_grad", "is_leaf", "shape", "dtype")),
        _PROPERTIES["grad"].__set__,
    ]
)
"""Those that PyTorch's optimizers, modules and compiled calls make of each parameter in each step."""


def reads_metadata(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a call reads what a tensor is, not its value."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", "") not in _VALUE_PROPERTIES
    if name == "type":
        return len(args) == 1
    return name in METADATA or (name.startswith(("is_", "_is_")) and name not in _READS_DESPITE_ITS_NAME)


def converts_nothing(unit: Unit, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a conversion is to the device and type that the parameter has."""
    if kwargs.get("copy"):
        return False
    if name == "cpu":
        return unit.device.type == "cpu"
    if name in moving_methods():
        probe = torch.empty(0, device=unit.device)
        return unit.device.type == name and getattr(probe, name)(*args[1:], **kwargs).device == unit.device
    if name in _CONVERSIONS:
        return unit.dtype == _CONVERSIONS[name]
    probe = torch.empty(0, dtype=unit.dtype, device=unit.device)
    try:
        return probe.to(*map(_without_number, args[1:]), **{k: _without_number(v) for k, v in kwargs.items()}) is probe
    except RuntimeError:
        return False  # let the real call complain


def _without_number(value: Any) -> Any:
    """Return a device as it is; the CPU, of which there is one, without the number that accelerate gives it on each rank."""
    if not isinstance(value, str | torch.device) or torch.device(value).type != "cpu":
        return value
    return torch.device("cpu")


never_compile_alone(reads_metadata)  # see `ShardedParameter.__torch_function__`
