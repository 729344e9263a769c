"""Conversions between a parameter's gradient and states as the user sees them and the flat shards that an optimizer updates."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import UnsupportedOptimizerError
from zinf_compile.runtime.comm.shard_ranges import shard_numel
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

_SHARDED = (ShardedGradient, ShardedTensor)


def like_parameter(shard: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Return the shard of a 0-d parameter as a 0-d tensor, so that its states have eager's shape."""
    return shard if unit.shape else shard.view(())


def local_gradient(parameter: ShardedParameter) -> torch.Tensor | None:
    """Return this rank's shard of a parameter's gradient, None without one; waits for its reduction."""
    return local_part(parameter.grad, parameter._zinf_unit)


def local_part(grad: torch.Tensor | None, unit: Unit) -> torch.Tensor | None:
    """Return this rank's shard of a unit's gradient, as `local_gradient` does."""
    if grad is None:
        return None
    return like_parameter(grad.local() if isinstance(grad, _SHARDED) else unit.local_part(grad), unit)


def shard_state(value: Any, unit: Unit, name: str, optimizer: Optimizer) -> Any:
    """Return the flat local shard of a state tensor, given full (from eager steps or a checkpoint) or local."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or (value.numel() == 1 and unit.numel > 1):
        return value
    if isinstance(value, ShardedTensor):
        return value.local()
    size = shard_numel(unit.numel, unit.shard_group.size)
    if unit.shard_group.size > 1 and value.dim() == 1 and value.numel() == size:
        return value
    if tuple(value.shape) == unit.shape:
        return unit.flat(value) if unit.shard_group.size == 1 else unit.local_part(value)
    raise UnsupportedOptimizerError(
        f"state {name!r} of {type(optimizer).__name__} for parameter {unit.name} has shape {list(value.shape)}; accepted: the "
        f"parameter's {list(unit.shape)}, or this rank's part [{size}] of {unit.shard_group.size} (was it saved with another "
        "number of ranks?)"
    )


def kept_state(value: Any, unit: Unit) -> Any:
    """Return a state tensor in the form kept between steps: the parameter's shape if the shard is all of it."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return unit.logical(value) if unit.shard_group.size == 1 and value.numel() == unit.numel else value
