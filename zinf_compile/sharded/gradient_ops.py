"""Operators on gradients: element by element on the shards, norms and reductions over all ranks, the rest on a single rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.device.link import DeviceLink
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.units.offloaded_gradient import OffloadedGradient
from zinf_compile.runtime.units.swap import offload
from zinf_compile.runtime.units.unit import Tile, Unit

from .call_names import call_name
from .eager_gradients import operands_of_sum
from .gradient import ShardedGradient
from .gradient_norms import global_norms
from .gradient_reductions import DRAWS, REDUCTIONS, TESTS, draw, reduce_over_ranks, reduces_whole
from .gradient_scaling import unscale
from .gradient_types import as_kept, changed_by, shown_types
from .left_norms import foreach_norms, norms_before, of_operator
from .operands import as_scalar
from .operators import view_of_gradient
from .tensor import ShardedTensor
from .tiled_gradient_ops import change_parts, is_loaded_by_tile

_ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "addcdiv",
        "addcmul",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clone",
        "copy",
        "detach",
        "div",
        "empty_like",
        "fill",
        "full_like",
        "lerp",
        "masked_fill",
        "maximum",
        "minimum",
        "mul",
        "nan_to_num",
        "neg",
        "ones_like",
        "pow",
        "reciprocal",
        "rsub",
        "sign",
        "sqrt",
        "square",
        "sub",
        "to",
        "_to_copy",
        "where",
        "zero",
        "zeros_like",
    ]
)
"""Operators whose result at an element depends on that element alone; also in their in-place and `_foreach_` forms."""


_ZEROES = frozenset(["zero_", "_foreach_zero_"])
_OVERWRITES = frozenset(["fill_", "zero_", "_foreach_zero_"])
"""In-place operators that read nothing of any gradient."""
_ALIASES = frozenset([torch.ops.aten.detach.default, torch.ops.aten.alias.default])


def answer_for_gradient(func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Perform an operator of which an argument is a gradient; those of a `ShardedTensor` beside it are that one's to answer."""
    if func in _ALIASES:  # of one tensor; autograd makes one of each gradient
        return args[0].alias()
    if any(kind is ShardedTensor for kind in types):
        return NotImplemented
    packet = func._schema.name.split("::")[-1]
    if packet == "add" and (mine := _first(args)) is not None:  # else it is `out`
        args = operands_of_sum(mine.unit, args)
    if packet in ("add", "add_") and (added := _add_whole(args, kwargs, in_place=packet == "add_")) is not None:
        return added
    if packet in _NORMS:
        return _NORMS[packet](func, args, kwargs)
    if packet == "_amp_foreach_non_finite_check_and_unscale_":
        return unscale(func, args)
    if packet in ("view", "_unsafe_view") and (args[0].offloaded is not None or args[0].unit.shard_group.size > 1):
        return view_of_gradient(func, args[0], args[1:], kwargs)
    if packet in _ZEROES:
        return _zero(packet, func, args, kwargs)
    if (out := kwargs.get("out")) is not None and out is not _first(args):
        return _whole(func, args, kwargs)
    foreach = packet.startswith("_foreach_")
    base = packet.removeprefix("_foreach_").rstrip("_")
    if base in _ELEMENTWISE and isinstance(_first(args), ShardedGradient):
        return (_foreach if foreach else _elementwise)(func, args, kwargs)
    if isinstance(_first(args), ShardedGradient) and _first(args).unit.shard_group.size > 1:
        if base in TESTS:
            return _elementwise(func, args, kwargs)
        if packet in REDUCTIONS and reduces_whole(func, args, kwargs):
            return reduce_over_ranks(func, args, kwargs)
        if packet in DRAWS:
            drawn = draw(func, args, kwargs)
            return _wrapped(_first(args).unit, drawn, drawn.dtype, on_device=True)
    return _whole(func, args, kwargs)


def _first(args: Sequence[Any]) -> Any:
    if args and isinstance(args[0], (list, tuple)):
        return next((item for item in args[0] if isinstance(item, ShardedGradient)), None)
    return next((item for item in args if isinstance(item, ShardedGradient)), None)


def _local_argument(value: Any, unit: Unit) -> Any:
    """Return what stands for an argument beside a shard of the unit: a whole tensor is broadcast to its shape, and cut."""
    if isinstance(value, ShardedGradient):
        _check_alike(value, unit)
        return value.local()
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    try:
        whole = value.expand(unit.shape)
    except RuntimeError:
        raise _other_shape(value, unit) from None
    return as_kept(as_scalar(value) if value.numel() == 1 else unit.local_part(whole), unit)


def _check_alike(gradient: ShardedGradient, unit: Unit) -> None:
    if gradient.unit.shape != unit.shape:
        raise _other_shape(gradient, unit)


def _other_shape(value: torch.Tensor, unit: Unit) -> PartitionedParameterError:
    return PartitionedParameterError(
        f"the gradient of {unit.name}, shape {list(unit.shape)}, is partitioned; arithmetic with one of {list(value.shape)} is "
        "not done on parts. Use a gradient or tensor of its shape, a tensor that broadcasts to it, a scalar, or full_tensor()"
    )


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    owner = _first(args)
    unit: Unit = owner.unit
    if func._schema.is_mutable and not isinstance(args[0], ShardedGradient):
        return _whole(func, args, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout")}
    if func._schema.is_mutable:
        _change(func, args[0], args[1:], kwargs)
        return args[0]
    result = func(*[_local_argument(a, unit) for a in args], **{k: _local_argument(v, unit) for k, v in kwargs.items()})
    return _wrapped(unit, result, *shown_types(func, args, kwargs, [result]))


def _zero(packet: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Overwrite gradients with zeros. Full ones that are kept until the step are not reduced for that."""
    listed = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    wholes = [whole for each in listed if isinstance(each, ShardedGradient) and (whole := each.whole) is not None]
    for whole in wholes:
        whole.drop()
    result = (_elementwise if packet == "zero_" else _foreach)(func, args, kwargs)
    for whole in wholes:
        whole.is_zero()
    return result


def _add_whole(args: Sequence[Any], kwargs: dict[str, Any], *, in_place: bool) -> ShardedGradient | None:
    """Return the sum of two gradients of a parameter that are kept whole until the step; None where others are to be added.

    So autograd adds what further backwards give, and what several graphs of one do.
    """
    mine, other = args[0], args[1]
    if kwargs or not (isinstance(mine, ShardedGradient) and isinstance(other, ShardedGradient)) or mine.unit is not other.unit:
        return None
    return mine.add_whole(other, in_place=in_place) if mine.dtype == other.dtype else None


class _Scalar:
    """A copy of a tensor without dimensions, on the host as on the device: gradients off the device are changed on either."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value.detach().clone()
        self._copies = {self._value.device: self._value}
        self._arriving: Pending | None = None

    def bring(self, link: DeviceLink) -> None:
        """Start to copy it to the host, for changes that another thread makes there; once."""
        host = torch.device("cpu")
        if host not in self._copies:
            there = link.host_buffer(1, self._value.dtype)
            self._arriving = link.to_host(self._value.view(1), there, None)
            self._copies[host] = there.view(())

    def on(self, device: torch.device) -> torch.Tensor:
        """Return it there; copied once. Any thread may call, where it was brought."""
        if self._arriving is not None and device.type == "cpu":
            self._arriving.wait()
        if device not in self._copies:
            self._copies[device] = self._value.to(device)
        return self._copies[device]


def _change(func: Any, gradient: ShardedGradient, args: Sequence[Any], kwargs: dict[str, Any], *, foreach: bool = False) -> None:
    """Change one gradient in place; with `foreach`, by an operator on lists, of which it and `args` are elements."""
    unit = gradient.unit
    args, kwargs = [_copied(a) for a in args], {k: _copied(v) for k, v in kwargs.items()}
    operands = [a[0] if isinstance(a, list) and len(a) == 1 else a for a in (*args, *kwargs.values())]
    beside: list[OffloadedGradient] = []
    alone = on_host = False
    if gradient.offloaded is not None:
        tensors = [a for a in operands if isinstance(a, torch.Tensor) and a.dim()]
        beside = [a.on_host for a in tensors if isinstance(a, ShardedGradient) and a.unit is unit and a.on_host is not None]
        on_host = gradient.on_host is not None and len(beside) == len(tensors)
        alone = on_host or not tensors
    if alone:
        for scalar in (a for a in operands if isinstance(a, _Scalar)):
            scalar.bring(unit.context.link)

    def local(value: Any) -> Any:
        if isinstance(value, list):
            return [local(item) for item in value]
        return value.on_host if on_host and isinstance(value, ShardedGradient) else _local_argument(value, unit)

    shards: dict[int, Any] = {}  # whole tensors are cut once for all tiles

    def change_part(tile: Tile, part: torch.Tensor) -> None:
        device = part.device  # `cut` refers to itself: what it referred to else would stay until a garbage collection

        def cut(value: Any) -> Any:
            if isinstance(value, list):
                return [cut(item) for item in value]
            if isinstance(value, ShardedGradient):
                _check_alike(value, unit)
                return value.part(tile)
            if id(value) not in shards:
                shards[id(value)] = _on(local(value), device)
            own = shards[id(value)]
            return tile.part(own) if isinstance(own, torch.Tensor) and own.numel() == unit.shard_numel else own

        func([part] if foreach else part, *map(cut, args), **{k: cut(v) for k, v in kwargs.items()})

    def change(shard: torch.Tensor) -> None:
        func(
            [shard] if foreach else shard,
            *[_on(a, shard.device) for a in others],
            **{k: _on(v, shard.device) for k, v in named.items()},
        )

    if is_loaded_by_tile(gradient) and not alone:
        change_parts(gradient, change_part, func._schema.name.split("::")[-1])
        return
    others, named = [local(a) for a in args], {k: local(v) for k, v in kwargs.items()}
    overwrites = func._schema.name.split("::")[-1] in _OVERWRITES
    gradient.change(change, elementwise=alone, of=beside, overwrites=overwrites)


def _copied(value: Any) -> Any:
    """Return arguments with copies in the place of tensors without dimensions, which may change before they are used."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    scalar = isinstance(value, torch.Tensor) and not value.dim() and not isinstance(value, ShardedGradient)
    return _Scalar(value) if scalar else value


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_on(item, device) for item in value]
    if isinstance(value, OffloadedGradient):
        return value.backing.resident
    if isinstance(value, torch.Tensor) and value.dim() and value.device != device:
        return value.to(device)
    return value.on(device) if isinstance(value, _Scalar) else value


def _foreach(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    owners: Sequence[Any] = args[0]

    if func._schema.is_mutable and any(isinstance(o, ShardedGradient) and o.offloaded is not None for o in owners):
        shared, named = [_copied(a) for a in args[1:]], {k: _copied(v) for k, v in kwargs.items()}
        for index, owner in enumerate(owners):  # one at a time: they needn't fit into memory together
            rest = [[v[index]] if isinstance(v, (list, tuple)) else v for v in shared]
            if isinstance(owner, ShardedGradient):
                _change(func, owner, rest, named, foreach=True)
            else:
                func([owner], *[_on(v, owner.device) for v in rest], **{k: _on(v, owner.device) for k, v in named.items()})
        return None

    def localised(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [
            _local_argument(v, o.unit) if isinstance(o, ShardedGradient) and isinstance(v, torch.Tensor) else v
            for v, o in zip(value, owners, strict=True)
        ]

    result = func(*[localised(a) for a in args], **{k: localised(v) for k, v in kwargs.items()})
    if func._schema.is_mutable:
        for owner in owners:
            if isinstance(owner, ShardedGradient):
                torch.autograd.graph.increment_version(owner.local())
        return None
    shown = shown_types(func, args, kwargs, result)
    return [
        _wrapped(o.unit, r, dtype) if isinstance(o, ShardedGradient) else r
        for o, r, dtype in zip(owners, result, shown, strict=True)
    ]


def _wrapped(unit: Unit, shard: torch.Tensor, dtype: torch.dtype, *, on_device: bool = False) -> ShardedGradient:
    """Return a result as a gradient: on the tier of gradients, or `on_device` if it is soon dropped."""
    shard = shard.to(unit.reduce_dtype) if dtype == unit.dtype else shard
    unit.context.memory.ledger.track("grads", shard)
    leaves = shard.dtype == unit.reduce_dtype and not on_device  # its place is made for that type
    return ShardedGradient(unit, *(offload(unit, shard, Done()) if leaves else (shard, Done())), dtype)


def _whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `func` on whole gradients, which a single rank has; elsewhere raise an error that names it."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    names = [a.name for a in arguments] + [""] * len(args)
    only_read = {a.name for a in arguments if a.alias_info is None}  # neither changed nor seen through the result

    def materialised(value: Any, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(materialised(v, name) for v in value)
        if not isinstance(value, ShardedGradient):
            return value
        if value.unit.shard_group.size == 1 and value.offloaded is not None and name in only_read:
            return value.full_tensor()
        whole = value.kept_whole(call_name(func))
        return whole.to(value.dtype) if name in only_read or not hasattr(func, "_schema") else whole

    whole = [materialised(a, name) for a, name in zip(args, names, strict=False)]
    named = {k: materialised(v, k) for k, v in kwargs.items()}
    changed = changed_by(func, args)
    if changed is None:
        return func(*whole, **named)
    func(*[as_kept(v, changed.unit) for v in whole], **{k: as_kept(v, changed.unit) for k, v in named.items()})
    return changed


def _norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    gradient = args[0]
    bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    dims = bound.get("dim")
    parts = bool(gradient.unit.tiles)
    of_all = (dims is None or len(dims) in (0, gradient.dim())) and not bound.get("keepdim")
    if gradient.unit.shard_group.size == 1 and not parts:
        norms = norms_before(gradient, of_operator(func, args[1:], kwargs)) if of_all else None
        return func(gradient.borrow().to(gradient.norm_dtype), *args[1:], **kwargs) if norms is None else norms[0].clone()
    if not of_all:
        return _whole(func, args, kwargs)
    order = bound.get("ord", bound.get("p", 2))
    return global_norms([gradient], 2.0 if order is None else order, bound.get("dtype"))[0]


def _foreach_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    order, dtype = bound.get("ord", 2), bound.get("dtype")
    sharded = [g for g in args[0] if isinstance(g, ShardedGradient)]
    if sharded[0].unit.shard_group.size == 1 and not any(g.unit.tiles for g in sharded):
        return foreach_norms(func, args[0], args[1:], kwargs)
    norms = iter(global_norms(sharded, order, dtype))
    return [next(norms) if isinstance(g, ShardedGradient) else torch.linalg.vector_norm(g, order, dtype=dtype) for g in args[0]]


_NORMS: dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "_foreach_norm": _foreach_norm,
}
