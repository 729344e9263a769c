"""Partitioning of whole tensors like the parameter beside which they are changed: those made before it was partitioned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zinf_compile._frames import inside_compiled_call
from zinf_compile._torch import become, no_torch_function, storage_owners, tree_leaves
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.units.companion_memory import make_values
from zinf_compile.runtime.units.shard_layout import DenseLayout, is_dense
from zinf_compile.runtime.units.shard_values import pieces_of
from zinf_compile.runtime.units.whole import scatter_whole

from .gradient import ShardedGradient
from .operands import has_whole_values
from .tensor import ShardedTensor, first_sharded


def partition_targets(name: str, targets: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Partition the whole tensors that a function is about to change, like the partitioned arguments beside them.

    The same tensor object then holds this rank's shard of rank 0's values. A collective operation. Leaves whole what it could not
    change in all places where it is known: a view, or a tensor that shares its memory with another, as `data` and `detach()` do;
    whole values are gathered for these, and beside what a forward changes, which differs from rank to rank. Refuses them on
    several ranks, outside of forwards, where autograd would need the gradient of a gathered value.
    """
    for index, target in enumerate(targets):
        if not isinstance(target, torch.Tensor) or isinstance(target, ShardedTensor | ShardedGradient):
            continue
        beside = _beside(index, args, kwargs)
        if beside is None:
            continue
        problem = "may be an activation" if inside_compiled_call() else _problem(target, beside)
        if not problem:
            _partition(name, target, beside)
        elif torch.is_grad_enabled() and any(t.requires_grad for t in (target, *_sharded(args), *_sharded(kwargs.values()))):
            because = f"it would change a whole tensor, which {problem}, and record it for autograd: use torch.no_grad()"
            beside.refuse(name, because, answered_by_whole=has_whole_values(beside.unit))


def _beside(index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensor | None:
    """Return the partitioned one among the other arguments; of lists, the element in the same place."""
    others = [*args[1:], *kwargs.values()]
    own = [value[index] if isinstance(value, (list, tuple)) and index < len(value) else value for value in others]
    return first_sharded([own, args[0] if "out" in kwargs else None])


def _sharded(values: Iterable[Any]) -> list[ShardedTensor]:
    return [value for value in tree_leaves(list(values)) if isinstance(value, ShardedTensor)]


def _problem(target: torch.Tensor, beside: ShardedTensor) -> str:
    """Return why a whole tensor can't become a partitioned one, empty where it can."""
    if type(target) is not torch.Tensor:
        return f"is a {type(target).__name__}"
    if target.requires_grad:
        return "requires grad"
    if target.shape != beside.shape:
        return f"has shape {list(target.shape)}"
    if target.device != beside.device:
        return f"is on {target.device}"
    if target.layout != torch.strided or not is_dense(tuple(target.shape), target.stride()):
        return "has gaps or overlaps in memory"
    size = format_of(target.dtype).bytes(target.numel())
    if target._base is not None or target.storage_offset() or target.untyped_storage().nbytes() != size:
        return "is a part of another one"
    return "shares its memory with another one" if storage_owners(target) > 1 else ""


def _partition(name: str, target: torch.Tensor, beside: ShardedTensor) -> None:
    unit = beside.unit
    context = unit.context
    what = f"partitioning a tensor like {unit.name}"
    dtype, stride = target.dtype, beside.stride()
    unit.ranks.agree([*beside.describe(name), f"{what}: a whole {dtype} is changed"], what=what)
    with unit.ranks.fail_together(what):  # one may have no room
        values = make_values(unit, dtype, lasting=True)
    with torch.no_grad(), no_torch_function():
        flat = DenseLayout(target.shape, stride, dtype, target.device).flat(target) if unit.shard_group.rank == 0 else None
        resident = values.resident
        shard = context.memory.staged_buffer(unit.shard_numel, dtype) if resident is None else resident
        scatter_whole(unit, flat, shard, what)
        for start, end in pieces_of(unit) if resident is None else ():
            values.write(start, shard[start:end].cpu()).wait()
        become(target, ShardedTensor(values, target.shape, stride))
