"""Calls that need whole values of partitioned tensors: they are loaded or gathered, where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zinf_compile._torch import tree_leaves, tree_map
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.units.shard_layout import DenseLayout
from zinf_compile.runtime.units.shard_values import DeviceShard

from .data_assignment import changed_parameters
from .eager_collectives import gather_alike, reduce_for_eager
from .gathered_copies import are_writable, lost_write, read_only, unrecorded_copy, versions
from .offloaded_value import value_of
from .operands import cut, has_whole_values
from .tensor import ShardedTensor, reads_memory


def on_whole_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` on whole values; `NotImplemented` where these can't be made.

    Those of a parameter of one rank alone are loaded when they are read, and what is written to them reaches the parameter.
    Autograd doesn't: where it records, and for tensors that are no parameters, there are copies.
    """
    found = [item for item in tree_leaves((args, kwargs)) if isinstance(item, ShardedTensor)]
    recorded = torch.is_grad_enabled() and any(item.requires_grad for item in found)
    if recorded and (own := next((item for item in found if isinstance(item, torch.nn.Parameter)), None)) is not None:
        raise PartitionedParameterError(
            f"a torch.nn.Parameter was made of values that are partitioned like parameter {own.unit.name}. Such a parameter "
            f"isn't partitioned itself, and {getattr(func, '__name__', func)}() can't train it. Accepted: copy.deepcopy(p), "
            "which is partitioned as well, changed in place then; or a torch.nn.Parameter of whole values, as full_tensor() and "
            "full_state_dict(model) return them"
        )
    if recorded or not all(item.is_parameter and item.unit.shard_group.size == 1 for item in found):
        return _on_copies(func, args, dict(kwargs), found)
    given, named = tree_map(_whole, tuple(args)), tree_map(_whole, dict(kwargs))
    name = getattr(func, "__name__", "")
    return getattr(given[0], name)(*given[1:], **named) if reads_memory(name) else func(*given, **named)


def _whole(item: Any) -> Any:
    if not isinstance(item, ShardedTensor):
        return item
    value = value_of(item.unit)
    same = tuple(item.shape) == tuple(value.shape) and item.stride() == value.stride()
    return value if same else torch.as_strided(value, item.shape, item.stride())


def _on_copies(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], found: Sequence[ShardedTensor]) -> Any:
    """Run `func` on copies that were gathered for it. Collective, on several ranks."""
    name = getattr(func, "__name__", str(func))
    if reads_memory(name) or any(isinstance(item, ShardedTensor) for item in changed_parameters(name, args, kwargs)):
        return NotImplemented
    if not all(has_whole_values(item.unit) and not item.answered_by_parameter for item in found):
        return NotImplemented
    distinct = {id(item): item for item in found}
    copies = {key: _copy(item) for key, item in distinct.items()}
    before = versions(list(copies.values()))

    def value_of(item: Any) -> Any:
        return copies.get(id(item), item) if isinstance(item, ShardedTensor) else item

    given, named = tree_map(value_of, tuple(args)), tree_map(value_of, kwargs)
    result = func(*given, **named)
    if are_writable(result, list(copies.values())):
        with torch.inference_mode():
            result = func(*given, **named)
    for item, copy, version in zip(distinct.values(), copies.values(), before, strict=True):
        if lost := lost_write(copy, version, result):
            item.refuse(name, lost)
    return read_only(result, list(copies.values()))


def _copy(tensor: ShardedTensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return unrecorded_copy(lambda: gather_alike(tensor))
    copy: torch.Tensor = _Gathered.apply(tensor) if tensor.requires_grad else gather_alike(tensor)
    return copy


class _Gathered(torch.autograd.Function):
    """The whole value of a tensor that was computed from shards, differentiable."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        ctx.unit, ctx.shape, ctx.stride = tensor.unit, tuple(tensor.shape), tensor.stride()
        return gather_alike(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        unit = ctx.unit
        flat = DenseLayout(ctx.shape, ctx.stride, grad.dtype, grad.device).flat(grad)
        if unit.shard_group.size == 1:
            shard = cut(flat, unit)
        else:
            shard = reduce_for_eager(unit, flat.to(unit.reduce_dtype, copy=True)).to(grad.dtype)
        unit.context.memory.ledger.track("grads", shard)
        return ShardedTensor(DeviceShard(unit, shard), ctx.shape, ctx.stride)
