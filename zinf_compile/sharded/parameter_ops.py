"""Eager calls on partitioned parameters whose values are spread over ranks or off the device: on shards, where these serve."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zinf_compile._frames import inside_compiled_call, stepping
from zinf_compile._torch import inside_transform, no_torch_function, tree_map
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.units.swap import offload
from zinf_compile.runtime.units.unit import Unit

from .calls import written
from .data_assignment import assign
from .gradient import ShardedGradient
from .metadata_calls import LIKE
from .offloaded_storage import is_read_later
from .offloaded_value import OffloadedValue
from .operands import cut_whole, gradient_values, is_scalar
from .tensor import ShardedTensor, assign_values, first_sharded, is_refusal, parameter_values, reads_memory
from .wrapping_optimizers import is_wrapper

_NOT_HERE = frozenset(
    [
        "__bool__",
        "__complex__",
        "__contains__",
        "__float__",
        "__format__",
        "__index__",
        "__int__",
        "__iter__",
        "__reduce_ex__",
        "__setitem__",
        "_has_compatible_shallow_copy_type",
        "is_nonzero",
        "item",
    ]
)
"""Operators whose own error says why they need the whole value."""

_FRAMES = 16
"""Up the stack within which a state dict or a wrapper of torch.distributed is looked for."""


DETACHED = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
"""The calls that give a parameter's values without their history."""


def on_shards(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], parameters: Sequence[Any]) -> Any:
    """Perform a call on the shards of `parameters`; return `NotImplemented` where it needs whole values."""
    units = {id(p): p._zinf_unit for p in parameters}
    if name in _NOT_HERE or reads_memory(name):
        return NotImplemented
    if all(unit.at_hand for unit in units.values()) and first_sharded((args, kwargs)) is None:
        return NotImplemented
    if _saves_or_wraps(alone=all(unit.shard_group.size == 1 for unit in units.values())):
        return NotImplemented
    if name == "__set__":
        return _assign(parameters[0], args[1])
    targets = {id(target) for target in written(name, args, kwargs)}
    differentiate = torch.is_grad_enabled() and name not in ("detach", *LIKE) and func not in DETACHED
    if differentiate and inside_transform():
        return NotImplemented  # its levels wrap plain tensors
    values: dict[int, ShardedTensor] = {}
    for parameter in parameters:
        with no_torch_function():
            needs_grad = parameter.requires_grad and differentiate
        if needs_grad and id(parameter) in targets:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if id(parameter) not in values:
            values[id(parameter)] = _Values.apply(parameter) if needs_grad else parameter_values(units[id(parameter)])
            values[id(parameter)].answered_by_parameter = True

    def value_of(item: Any) -> Any:
        return values.get(id(item), item) if isinstance(item, torch.Tensor) else item

    try:
        result = func(*tree_map(value_of, tuple(args)), **tree_map(value_of, kwargs))
    except PartitionedParameterError as error:
        if not is_refusal(error):
            raise
        return NotImplemented
    by_values = {id(values[id(p)]): p for p in parameters}
    return tree_map(lambda item: by_values.get(id(item), item), result)


def makes_companion(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call makes a tensor like a parameter without values on this process: it is partitioned alike.

    Not in a forward on several ranks, which would fill it with each rank's own.
    """
    if getattr(func, "__name__", "") not in LIKE or not args:
        return False
    unit, device = getattr(args[0], "_zinf_unit", None), kwargs.get("device")
    if not isinstance(unit, Unit) or unit.at_hand or (unit.shard_group.size > 1 and inside_compiled_call()):
        return False
    return device is None or torch.empty(0, device=device).device == unit.device


def _assign(parameter: Any, value: Any) -> Any:
    """Perform `parameter.data = value` for a value that is partitioned alike, or on a single rank for a whole one."""
    unit: Unit = parameter._zinf_unit
    if isinstance(other := getattr(value, "_zinf_unit", None), Unit):  # a parameter
        value = other.whole() if other.at_hand else parameter_values(other)
    if isinstance(value, OffloadedValue):  # of what was recorded for autograd, as `parameter.data += product`
        if value.is_all_of(unit):
            return None
        value = value.detach().clone()
    alone = unit.shard_group.size == 1
    is_plain = alone and type(value) in (torch.Tensor, nn.Parameter) and value.device == unit.device
    if not (isinstance(value, ShardedTensor) or is_plain) or (tuple(value.shape), value.dtype) != (unit.shape, unit.dtype):
        return NotImplemented
    if unit.at_hand:
        assign(unit, value.full_tensor() if isinstance(value, ShardedTensor) else value)
        return None
    if is_read_later(unit):
        raise PartitionedParameterError(
            f"parameter {unit.name} can't be given other values by `parameter.data = value` while a tensor of its state dict is "
            "referred to, which reads the parameter's values only when they are asked for: drop it, or keep a clone() of it; "
            "`parameter.data.copy_(value)` changes both"
        )
    assign_values(unit, value)
    return None


def _saves_or_wraps(*, alone: bool) -> bool:
    """Return whether `state_dict()`, or DDP or FSDP, is what calls: these would take shards for parameters.

    Or, on several ranks, `load_state_dict()`, which one of them may call alone.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        loads = code.co_name == "_load_from_state_dict" and not alone
        if loads or code.co_name == "_save_to_state_dict" or "torch/distributed/" in code.co_filename.replace("\\", "/"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return any(_entered_before(optimizer) for optimizer in stepping())


def _entered_before(optimizer: Any) -> bool:
    """Return whether an optimizer's step runs on hollow parameters: its closure has partitioned them."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not getattr(type(optimizer).step, "hooked", False):
        return False
    if is_wrapper(optimizer):
        return False
    return any(hasattr(p, "_zinf_unit") for group in optimizer.param_groups for p in group["params"])


class _Values(torch.autograd.Function):
    """A parameter's values on shards, differentiable."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> ShardedTensor:
        ctx.unit = parameter._zinf_unit
        with no_torch_function():
            ctx.version = parameter._version
        return parameter_values(ctx.unit)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        unit: Unit = ctx.unit
        parameter = unit.parameter()
        with no_torch_function():
            if parameter is not None and parameter._version != ctx.version:
                raise RuntimeError(
                    f"parameter {unit.name} was changed in place, as by a step, between what was computed from it and the "
                    "backward of that: call backward() first"
                )
        shard = _local_gradient(grad, unit).to(unit.reduce_dtype)
        unit.context.memory.ledger.track("grads", shard)
        return ShardedGradient(unit, *offload(unit, shard, Done()))


def _local_gradient(grad: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Return this rank's part of a gradient, in memory of its own."""
    like = parameter_values(unit)
    if isinstance(grad, ShardedGradient):
        grad = ShardedTensor(gradient_values(grad), grad.shape, grad.stride())
    if isinstance(grad, ShardedTensor):
        return grad.local().clone()
    if is_scalar(grad):
        value = grad.as_strided((1,), (1,), grad.storage_offset())
        return value.expand(unit.shard_numel).clone()
    return cut_whole(grad, like, "backward")
