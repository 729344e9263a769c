"""Operands of an operation on shards: the arguments that have a shard, and whether they are partitioned alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from zinf_compile._frames import inside_compiled_call
from zinf_compile._torch import runs_backward
from zinf_compile.errors import RankMismatchError
from zinf_compile.runtime.comm.fingerprint import fingerprint
from zinf_compile.runtime.units.shard_layout import DenseLayout
from zinf_compile.runtime.units.shard_values import DeviceShard, OffloadedGradientShard, ShardValues
from zinf_compile.runtime.units.unit import Unit

from .gradient import ShardedGradient
from .tensor import ShardedTensor


def shard_of(value: torch.Tensor, owner: ShardedTensor, operator: str) -> ShardValues | None:
    """Return the shard of an argument beside `owner`; None for a scalar.

    A whole tensor of the same shape is cut, where it has the same values on all ranks: a collective operation that raises
    `RankMismatchError` where it hasn't. Whatever isn't partitioned alike is refused.
    """
    if isinstance(value, ShardedTensor):
        _check_alike(value.unit, value.shape, value.stride(), owner, operator)
        return value.shard_values
    if isinstance(value, ShardedGradient):
        _check_alike(value.unit, value.shape, value.stride(), owner, operator)
        return gradient_values(value)
    scalar = is_scalar(value)
    if (
        scalar
        and value.dim() <= owner.dim()
        and all(own in (1, size) for own, size in zip(reversed(value.shape), reversed(owner.shape), strict=False))
    ):
        return None
    if scalar or value.shape != owner.shape or value.layout != torch.strided:
        because = f"beside a tensor of shape {list(value.shape)} it would be broadcast"
        owner.refuse(operator, because, answered_by_whole=has_whole_values(owner.unit))
    return DeviceShard(owner.unit, cut_whole(value, owner, operator))


def has_whole_values(unit: Unit) -> bool:
    """Say whether whole values may be made of what is partitioned like `unit`: on one rank, inside a compiled call or a backward.

    Dynamo leaves parts of some forwards to eager code, as those with a graph break in a loop; their custom functions may read in
    the backward what they were given. All ranks call what is compiled, and its backward; what else reads a parameter may be the
    code of one rank alone.
    """
    return unit.shard_group.size == 1 or inside_compiled_call() or runs_backward()


def gradient_values(gradient: ShardedGradient) -> ShardValues:
    """Return a gradient's shard."""
    offloaded = gradient.offloaded
    return DeviceShard(gradient.unit, gradient.local()) if offloaded is None else OffloadedGradientShard(gradient.unit, offloaded)


def is_scalar(value: torch.Tensor) -> bool:
    """Return whether all elements of a whole tensor are one."""
    return value.numel() == 1 or all(step == 0 for step, size in zip(value.stride(), value.shape, strict=True) if size > 1)


def as_scalar(value: torch.Tensor) -> torch.Tensor:
    """Return that element, such that types are promoted beside it as beside the tensor."""
    if not value.dim():
        return value
    return value.as_strided((1,), (1,), value.storage_offset())


def cut_whole(value: torch.Tensor, owner: ShardedTensor, operator: str) -> torch.Tensor:
    """Return this rank's part of a whole tensor beside `owner`, after all ranks have found that they have the same one."""
    flat = DenseLayout(owner.shape, owner.stride(), value.dtype, value.device).flat(value.detach())
    if owner.unit.shard_group.size > 1:
        try:
            owner.unit.ranks.agree(
                [*owner.describe(operator), f"beside a whole tensor, {fingerprint(flat)}"], what=f"{operator}()"
            )
        except RankMismatchError as error:
            raise RankMismatchError(
                f"{operator}() of what is partitioned like {owner.unit.name} and of a whole tensor, which must have the same "
                f"values on all ranks: make it from the partitioned one, as clone() does, or seed all ranks alike. {error}"
            ) from None
    return cut(flat, owner.unit)


def cut(flat: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Return this rank's part of a flat whole tensor, padded with zeros."""
    part = torch.cat([flat[start:end] for start, end in unit.held])
    return torch.cat([part, part.new_zeros(unit.shard_numel - part.numel())])


def _check_alike(unit: Unit, shape: Sequence[int], stride: Sequence[int], owner: ShardedTensor, operator: str) -> None:
    own = owner.unit
    if tuple(shape) != tuple(owner.shape):
        _refuse(owner, operator, f"beside one partitioned like {unit.name}, of shape {list(shape)}, it would be broadcast")
    strides = [(a, b) for a, b, size in zip(stride, owner.stride(), shape, strict=True) if size > 1]
    if any(a != b for a, b in strides):
        _refuse(owner, operator, f"one partitioned like {unit.name} lies in memory in another order")
    if unit.spans != own.spans or _ranks_differ(unit, own):
        _refuse(owner, operator, f"one partitioned like {unit.name} is cut otherwise, or over other ranks")


def _refuse(owner: ShardedTensor, operator: str, because: str) -> NoReturn:
    owner.refuse(operator, because, answered_by_whole=has_whole_values(owner.unit) and not operator.endswith("_"))


def _ranks_differ(one: Unit, other: Unit) -> bool:
    """Return whether two units are cut over other ranks, or by models that share nothing."""
    if one.shard_group.partition != other.shard_group.partition:
        return True
    return one.context is not other.context and one.shard_group.size > 1
