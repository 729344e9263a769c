"""Operators on tensors that are partitioned alike: element by element on the shards, wherever these are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from zinf_compile._torch import tree_leaves, tree_map
from zinf_compile.runtime.units.companion_memory import check_room, make_values
from zinf_compile.runtime.units.shard_changes import spoiling
from zinf_compile.runtime.units.shard_layout import is_dense
from zinf_compile.runtime.units.shard_values import DeviceShard, ShardValues

from .eager_gradients import operands_of_sum
from .gradient import ShardedGradient
from .metadata_calls import LIKE
from .operands import as_scalar, gradient_values, shard_of
from .reductions import REDUCTIONS, norms_of_all, reduce
from .shard_pieces import Pieces, over_pieces
from .tensor import ShardedTensor, first_sharded, same_values

aten = torch.ops.aten

_LASTING = LIKE | {"_to_copy", "clone", "copy"}
"""Operators that make a copy, of a value or of a shape, that is likely to be kept."""

_BACKWARDS = frozenset(
    f"{name}_backward"
    for name in ("elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "softplus", "hardshrink", "softshrink")
)
_ELEMENTWISE_BESIDES = _LASTING | _BACKWARDS | {"fill", "floor_divide", "rsub", "where", "zero"}
"""Element-wise, though PyTorch doesn't tag them so."""

_OVERWRITES = frozenset(["copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"])
"""In-place operators that don't read what they change."""

_VIEWS = frozenset(["_reshape_alias", "_unsafe_view", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"])
_NEW = frozenset(["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"])
"""Operators that make a tensor of a given shape: whole, however their own tensor is partitioned."""

_OF_MEMORY = ("layout", "pin_memory", "non_blocking", "memory_format", "device")


@torch.compiler.disable
def answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Perform an operator of which an argument is a `ShardedTensor`; raise what names it where it needs whole values."""
    packet = func._schema.name.split("::")[-1]
    if packet in ("detach", "alias", "lift_fresh"):
        return same_values(args[0])
    if packet in _VIEWS and isinstance(args[0], ShardedTensor):
        return _view(func, args[0], args[1:], kwargs)
    if packet in _NEW:
        return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
    if packet in REDUCTIONS:
        return reduce(func, packet, args, kwargs)
    if packet == "_foreach_norm":
        return norms_of_all(func, args, kwargs)
    if packet == "add":
        args = operands_of_sum(_owner(args, kwargs).unit, args)
    if _is_elementwise(packet):
        return (
            _foreach(func, packet, args, kwargs) if packet.startswith("_foreach_") else _elementwise(func, packet, args, kwargs)
        )
    return _owner(args, kwargs).refuse(packet)


def view_of_gradient(func: Any, gradient: ShardedGradient, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensor:
    """Return another view of a gradient's shard."""
    return _view(func, ShardedTensor(gradient_values(gradient), gradient.shape, gradient.stride()), args, kwargs)


@functools.cache
def _is_elementwise(packet: str) -> bool:
    base = packet.removeprefix("_foreach_").rstrip("_")
    operator = getattr(aten, base, None)
    if base in _ELEMENTWISE_BESIDES or operator is None:
        return base in _ELEMENTWISE_BESIDES
    tags = [getattr(operator, name).tags for name in operator.overloads()]
    return any(torch.Tag.pointwise in found for found in tags) and not any(
        torch.Tag.nondeterministic_seeded in found for found in tags
    )


def _owner(args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensor:
    owner = first_sharded((args, kwargs))
    assert owner is not None, "it was called for one"
    return owner


def _view(func: Any, tensor: ShardedTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedTensor:
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    seen = func(shape, *args, **kwargs)
    if seen.numel() != tensor.numel() or seen.storage_offset() or not is_dense(tuple(seen.shape), seen.stride()):
        tensor.refuse(func._schema.name.split("::")[-1])
    return ShardedTensor(tensor.shard_values, seen.shape, seen.stride())


def _foreach(func: Any, packet: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Take one element of the lists after the other: they needn't fit into memory together."""
    count = len(args[0])

    def element(value: Any, index: int) -> Any:
        return [value[index]] if isinstance(value, (list, tuple)) and len(value) == count else value

    results = []
    for index in range(count):
        own, named = [element(a, index) for a in args], {k: element(v, index) for k, v in kwargs.items()}
        found = (_elementwise(func, packet, own, named),) if first_sharded((own, named)) is not None else func(*own, **named)
        results.append(found[0] if found else None)
    return None if func._schema.is_mutable else results


def _elementwise(func: Any, packet: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    owner = _owner(args, kwargs)
    target = _written(func, args, kwargs)
    if target is not None and not isinstance(target, ShardedTensor | ShardedGradient):
        return func(*tree_map(_whole, tuple(args)), **tree_map(_whole, kwargs))
    _check_memory(owner, packet, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_MEMORY}
    base = packet.removeprefix("_foreach_").rstrip("_")
    operands: dict[int, ShardValues] = {}
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and id(value) not in operands:
            values = shard_of(value, owner, packet)
            if values is not None:
                operands[id(value)] = values

    def perform(pieces: Pieces) -> Any:
        def local(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            piece = pieces.get(id(value))
            if piece is None:
                return as_scalar(value)
            return piece if owner.shape else piece.view(())

        result = func(*tree_map(local, tuple(args)), **tree_map(local, kwargs))
        return result[0] if isinstance(result, (list, tuple)) else result

    with torch.no_grad():
        if target is not None:
            _change(owner, packet, operands, perform, id(target))
            return target
        return _make(owner, base, operands, perform)


def _whole(value: Any) -> Any:
    """Gather a partitioned argument beside a whole tensor that is changed."""
    return value.full_tensor() if isinstance(value, ShardedTensor | ShardedGradient) else value


def _change(owner: ShardedTensor, packet: str, operands: dict[int, ShardValues], perform: Any, target: int) -> None:
    resident = {key: values.resident for key, values in operands.items()}
    operands[target].changing()
    if all(shard is not None for shard in resident.values()):
        perform(resident)
    else:

        def change(pieces: Pieces, start: int, end: int) -> torch.Tensor:
            perform(pieces)
            return pieces[target]

        unread = frozenset([target]) if packet in _OVERWRITES else frozenset()
        with spoiling(operands[target], packet) as written:
            over_pieces(owner.unit, operands, change, unread=unread, into=written)
    if packet in _OVERWRITES:
        operands[target].restored()
    operands[target].changed(packet)


def _make(owner: ShardedTensor, base: str, operands: dict[int, ShardValues], perform: Any) -> ShardedTensor:
    unit = owner.unit
    values: ShardValues
    resident = {key: values.resident for key, values in operands.items()}
    if all(shard is not None for shard in resident.values()):
        check_room(unit, owner.dtype)
        result = perform(resident).reshape(-1)
        if any(result is shard for shard in resident.values()):
            result = result.clone()
        unit.context.memory.ledger.track("staging", result)
        values = DeviceShard(unit, result)
    else:
        made: list[ShardValues] = []

        def room(result: torch.Tensor) -> ShardValues:
            made.append(make_values(unit, result.dtype, lasting=base in _LASTING))
            return made[0]

        unread = frozenset(operands) if base in LIKE else frozenset()
        over_pieces(unit, operands, lambda pieces, start, end: perform(pieces), unread=unread, into=room)
        values = made[0]
    return ShardedTensor(values, owner.shape, owner.stride())


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the argument that an operator changes, None where there is none."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if value is not None:
                return value[0] if isinstance(value, (list, tuple)) else value
    return None


def _check_memory(owner: ShardedTensor, packet: str, kwargs: dict[str, Any]) -> None:
    device, order = kwargs.get("device"), kwargs.get("memory_format")
    if device is not None and torch.empty(0, device=device).device != owner.device:
        owner.refuse(packet, f"its shards stay where they are, they can't go to {device}")
    if order not in (None, torch.preserve_format) and not owner.is_contiguous(memory_format=order):
        owner.refuse(packet, f"its memory is not in the order {order}")
