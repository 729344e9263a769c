"""Eligibility of parameters for partitioning: dense, real, of `torch.nn.Parameter`'s own class."""

from __future__ import annotations

import torch

from zinf_compile._torch import PARAMETER_TYPES
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.runtime.units.shard_layout import is_dense

from .parameter import ShardedParameter


def reject_unsupported(parameter: torch.Tensor, slot: ParameterSlot, *, with_values: bool = True) -> None:
    """Raise `UnsupportedModelError` for a parameter that can't be partitioned; without values, one on the meta device may be."""
    problem = problem_of(parameter, slot, with_values=with_values)
    if problem is not None:
        raise UnsupportedModelError(f"parameter {slot.name}, shape {list(slot.shape)}, {problem}")


def problem_of(parameter: torch.Tensor, slot: ParameterSlot, *, with_values: bool = True) -> str | None:
    """Return why a parameter can't be partitioned, and what to do; None: it can."""
    if parameter.layout != torch.strided:
        return f"has layout {parameter.layout}; accepted: dense (torch.strided) parameters"
    if parameter.is_complex():
        return f"is complex ({parameter.dtype}); accepted: real parameters (torch.view_as_real keeps the numbers)"
    if type(parameter) not in (*PARAMETER_TYPES, ShardedParameter):
        kind = f"{type(parameter).__module__}.{type(parameter).__qualname__}"
        return (
            f"is a {kind}; accepted: torch.nn.Parameter. DTensor means that fully_shard or tensor parallelism was applied: this "
            "backend partitions by itself: remove the wrapper"
        )
    if parameter.is_inference():
        return (
            "was made in torch.inference_mode(), and PyTorch lets nobody replace such a tensor's memory; make the model in "
            "torch.no_grad(): it may be called in inference mode then"
        )
    if parameter.device.type == "meta" and with_values:
        return (
            "is on the meta device and has no values; call model.to_empty(device=...) and initialise or load it first, or "
            "zinf_compile.partition(model, ...), which never has the whole model in memory"
        )
    if not is_dense(slot.shape, slot.stride):
        return f"has gaps or overlaps in memory (strides {slot.stride}); first: parameter.data = parameter.data.contiguous()"
    return None
