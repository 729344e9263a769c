"""The gradient of a partitioned parameter: autograd sees the logical shape, each rank holds its reduced shard."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from zinf_compile._torch import no_override
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.transfer.swap import take_away
from zinf_compile.runtime.units.offloaded_gradient import AwayGradient
from zinf_compile.runtime.units.unit import Tile, Unit
from zinf_compile.runtime.units.whole import gather_whole

from .call_names import call_name
from .gradient_norms import global_norms
from .gradient_reductions import DRAWS, REDUCTIONS, TESTS, draw, reduce_over_ranks, reduces_whole
from .gradient_types import as_kept, changed_by, shown_types
from .tiled_gradient_ops import change_parts, comes_in_parts, part_of_gradient, valid_parts

aten = torch.ops.aten

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


class ShardedGradient(torch.Tensor):
    """A gradient averaged over the ranks, of which this rank holds 1/N.

    Answers element-wise arithmetic, norms (over all ranks) and what autograd, `clip_grad_*`, `zero_grad` and `GradScaler` do
    with a gradient. Anything else needs the whole gradient: `full_tensor()`, on all ranks. On a single rank everything works.

    Its `dtype` is the parameter's, as autograd demands; the shard is kept in the unit's `reduce_dtype`, and sums, products and
    norms are taken of that. Views of it on a single rank share its memory, and have its type.
    """

    __slots__ = ("_pending", "_shard", "_unit")  # every step makes one for each parameter
    _unit: Unit
    _shard: torch.Tensor | AwayGradient
    """On the device, or, with what tier it has, elsewhere."""
    _pending: Pending
    answered_by: ClassVar[list[type]] = []
    """Classes of tensors that answer what is done with a gradient and one of them."""

    @staticmethod
    def __new__(
        cls, unit: Unit, shard: torch.Tensor | AwayGradient, pending: Pending, dtype: torch.dtype | None = None
    ) -> ShardedGradient:
        return torch.Tensor._make_wrapper_subclass(
            cls, unit.shape, strides=unit.stride, dtype=dtype or unit.dtype, device=unit.device, requires_grad=False
        )

    def __init__(
        self, unit: Unit, shard: torch.Tensor | AwayGradient, pending: Pending, dtype: torch.dtype | None = None
    ) -> None:
        self._unit, self._shard, self._pending = unit, shard, pending

    @property
    def unit(self) -> Unit:
        """The partitioned parameter this is a gradient of."""
        return self._unit

    @property
    def kept_dtype(self) -> torch.dtype:
        """The type of the shard."""
        return self._shard.dtype

    @property
    def norm_dtype(self) -> torch.dtype:
        """The type of its norms: the more precise one, so that clipping rounds no more than the sum over the ranks did."""
        return torch.promote_types(self.dtype, self.kept_dtype)

    @property
    def away(self) -> AwayGradient | None:
        """The shard, where it isn't on the device."""
        return self._shard if isinstance(self._shard, AwayGradient) else None

    def local(self) -> torch.Tensor:
        """Return this rank's shard, flat, with its padding; waits for the reduction. A copy, where the shard is `away`."""
        self._pending.wait()
        if not isinstance(self._shard, AwayGradient):
            return self._shard
        with self._unit.context.meter.waiting():
            return self._shard.load()

    def valid_parts(self) -> Iterator[torch.Tensor]:
        """Yield this rank's elements, padding left away: all at once, or tile by tile."""
        return valid_parts(self)

    def prepare(self, *, early: bool = False) -> None:
        """Start to bring the shard for the next `local`; with `early`, only where there is room besides."""
        if isinstance(self._shard, AwayGradient):
            with self._unit.context.meter.waiting():
                self._shard.prepare(early=early)

    def state(self) -> tuple[object, int]:
        """Return what the shard is, by identity, and how often it was changed."""
        return (self._shard, self._shard.version) if isinstance(self._shard, AwayGradient) else (s := self.local(), s._version)

    def change(self, function: Callable[[torch.Tensor], object], *, elementwise: bool) -> None:
        """Change the shard in place; where it is away, and `elementwise` allows it, when it is next read."""
        away = self.away
        if away is None:
            shard = self.local()
            function(shard)
            torch.autograd.graph.increment_version(shard)  # which PyTorch doesn't below autograd; on padding, too
        elif elementwise:
            away.change(function)
        else:
            shard = self.local()
            function(shard)
            away.store(shard)

    def borrow(self) -> torch.Tensor:
        """Return the whole gradient on the device, on a single rank, to be read and dropped."""
        shard = self.local()
        there = shard.to(self._unit.device)
        if there is not shard:
            self._unit.context.ledger.track("staged", there)
        return self._unit.logical(there)

    def full_tensor(self) -> torch.Tensor:
        """Return the whole averaged gradient on every rank, in this gradient's `dtype`. A collective operation.

        Where it is reduced and kept in a more precise type, `grad.float().full_tensor()` is what was kept, not rounded.
        """
        context = self._unit.context
        own = self.local()
        shard = own.to(self._unit.device, self.dtype)
        if context.size == 1:
            return self._unit.logical(shard.clone() if shard is own else shard)
        context.agree([f"gradient of {self._unit.name}, unit {self._unit.serial}"], what="gathering a gradient")
        full = context.full_buffer(self._unit.numel, shard.dtype, shard.device)
        gather_whole(self._unit, shard, full, f"gathering the gradient of {self._unit.name}")
        return self._unit.logical(full)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole gradient as an array; on a single rank only."""
        return _whole(torch.Tensor.detach, (self,), {}, "numpy()").numpy(force=force)

    def tolist(self) -> Any:
        """Return the whole gradient as numbers; on a single rank only."""
        return _whole(torch.Tensor.detach, (self,), {}, "tolist()").tolist()

    def share_memory_(self) -> NoReturn:
        raise PartitionedParameterError(
            f"the gradient of {self._unit.name} is partitioned and can't be moved to shared memory: share grad.full_tensor()"
        )

    def __dlpack__(self, **kwargs: Any) -> Any:
        return _whole(torch.Tensor.detach, (self,), {}, "__dlpack__()").__dlpack__(**kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _whole(torch.Tensor.clone, (self,), {}, "saving or pickling").__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        context = self._unit.context
        if context.size == 1 and self.away is None:
            return repr(self._unit.logical(self.local()))
        return (
            f"ShardedGradient({self._unit.name}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"rank {context.rank} of {context.size})"
        )

    __torch_function__ = no_override  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind in cls.answered_by for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        packet = func._schema.name.split("::")[-1]
        if packet in ("detach", "alias"):
            source = args[0]
            return cls(source._unit, source._shard, source._pending, source.dtype)
        if packet in _NORMS:
            return _NORMS[packet](func, args, kwargs)
        if packet == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(func, args)
        if packet in ("view", "_unsafe_view") and (args[0].away is not None or args[0].unit.context.size > 1):
            return _view_on_shards(func, args, kwargs)
        foreach = packet.startswith("_foreach_")
        base = packet.removeprefix("_foreach_").rstrip("_")
        if base in _ELEMENTWISE and isinstance(_first(args), ShardedGradient):
            return (_foreach if foreach else _elementwise)(func, args, kwargs)
        if isinstance(_first(args), ShardedGradient) and _first(args).unit.context.size > 1:
            if base in TESTS:
                return _elementwise(func, args, kwargs)
            if packet in REDUCTIONS and reduces_whole(func, args, kwargs):
                return reduce_over_ranks(func, args, kwargs)
            if packet in DRAWS:
                drawn = draw(func, args, kwargs)
                return _wrapped(_first(args).unit, drawn, drawn.dtype, on_device=True)
        return _whole(func, args, kwargs)


def _view_on_shards(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from .operators import view_of_gradient  # noqa: PLC0415  (which works on gradients, too)

    return view_of_gradient(func, args[0], args[1:], kwargs)


def ahead(gradients: Sequence[Any]) -> Iterator[Any]:
    """Yield gradients while the next one, where it isn't on the device, is on its way, if there is room for both."""
    for gradient, following in itertools.zip_longest(gradients, gradients[1:]):
        for each in (gradient, following):
            if isinstance(each, ShardedGradient) and not comes_in_parts(each):
                each.prepare(early=each is following)
        yield gradient


def _first(args: Sequence[Any]) -> Any:
    if args and isinstance(args[0], (list, tuple)):
        return next((item for item in args[0] if isinstance(item, ShardedGradient)), None)
    return next((item for item in args if isinstance(item, ShardedGradient)), None)


def _local_argument(value: Any, unit: Unit) -> Any:
    if isinstance(value, ShardedGradient):
        return value.local()
    if isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == unit.shape:
        return as_kept(unit.local_part(value), unit)
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        raise PartitionedParameterError(
            f"the gradient of {unit.name}, shape {list(unit.shape)}, is partitioned; arithmetic with a tensor of shape "
            f"{list(value.shape)} would broadcast over it. Use a tensor of the same shape, a scalar, or full_tensor()"
        )
    return value


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    owner = _first(args)
    unit: Unit = owner._unit
    if func._schema.is_mutable and not isinstance(args[0], ShardedGradient):
        return _whole(func, args, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "layout")}
    if func._schema.is_mutable:
        _change(func, args[0], args[1:], kwargs)
        return args[0]
    result = func(*[_local_argument(a, unit) for a in args], **{k: _local_argument(v, unit) for k, v in kwargs.items()})
    return _wrapped(unit, result, *shown_types(func, args, kwargs, [result]))


def _change(func: Any, gradient: ShardedGradient, args: Sequence[Any], kwargs: dict[str, Any], *, foreach: bool = False) -> None:
    """Change one gradient in place; with `foreach`, by an operator on lists, of which it and `args` are elements."""
    unit = gradient.unit
    operands = [a[0] if isinstance(a, list) and len(a) == 1 else a for a in (*args, *kwargs.values())]
    alone = gradient.away is not None and not any(isinstance(a, torch.Tensor) and a.dim() for a in operands)

    def local(value: Any) -> Any:
        if isinstance(value, list):
            return [local(item) for item in value]
        return value.clone() if alone and isinstance(value, torch.Tensor) else _local_argument(value, unit)

    def change_part(tile: Tile, part: torch.Tensor) -> None:
        def cut(value: Any) -> Any:
            if isinstance(value, list):
                return [cut(item) for item in value]
            if isinstance(value, ShardedGradient):
                return part_of_gradient(value, tile)
            own = local(value)
            return tile.part(own) if isinstance(own, torch.Tensor) and own.numel() == unit.shard_numel else own

        func([part] if foreach else part, *map(cut, args), **{k: cut(v) for k, v in kwargs.items()})

    def change(shard: torch.Tensor) -> None:
        func([shard] if foreach else shard, *others, **named)

    if comes_in_parts(gradient) and not alone:
        change_parts(gradient, change_part)
        return
    others, named = [local(a) for a in args], {k: local(v) for k, v in kwargs.items()}
    gradient.change(change, elementwise=alone)


def _foreach(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    owners: Sequence[Any] = args[0]

    if func._schema.is_mutable and any(isinstance(o, ShardedGradient) and o.away is not None for o in owners):
        for index, owner in enumerate(owners):  # one at a time: they needn't fit into memory together
            rest = [[v[index]] if isinstance(v, (list, tuple)) else v for v in args[1:]]
            if isinstance(owner, ShardedGradient):
                _change(func, owner, rest, kwargs, foreach=True)
            else:
                func([owner], *rest, **kwargs)
        return None

    def localised(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [
            _local_argument(v, o._unit) if isinstance(o, ShardedGradient) and isinstance(v, torch.Tensor) else v
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
        _wrapped(o._unit, r, dtype) if isinstance(o, ShardedGradient) else r
        for o, r, dtype in zip(owners, result, shown, strict=True)
    ]


def _wrapped(unit: Unit, shard: torch.Tensor, dtype: torch.dtype, *, on_device: bool = False) -> ShardedGradient:
    """Return what is made of a gradient: where gradients live or, as suits what is soon dropped, `on_device`."""
    shard = shard.to(unit.reduce_dtype) if dtype == unit.dtype else shard
    unit.context.ledger.track("grads", shard)
    leaves = shard.dtype == unit.reduce_dtype and not on_device  # its place is made for that type
    return ShardedGradient(unit, *(take_away(unit, shard, Done()) if leaves else (shard, Done())), dtype)


def _whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any], called: str | None = None) -> Any:
    """Run `func` on whole gradients, which a single rank has; elsewhere raise an error that says what was `called`."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    names = [a.name for a in arguments] + [""] * len(args)
    only_read = {a.name for a in arguments if a.alias_info is None}  # neither changed nor seen through the result

    def materialised(value: Any, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(materialised(v, name) for v in value)
        if not isinstance(value, ShardedGradient):
            return value
        unit = value._unit
        if unit.context.size == 1 and value.away is not None and name in only_read:
            return value.full_tensor()
        if unit.context.size > 1 or value.away is not None:
            place = f"each of {unit.context.size} ranks holds a part" if value.away is None else "the shards are off the device"
            raise PartitionedParameterError(
                f"{called or call_name(func)} needs the whole gradient of {unit.name}, of which {place}; element-wise "
                "arithmetic, norms, max() or sum() of all elements, clipping and GradScaler work on it as it is; for "
                "anything else call grad.full_tensor() on all ranks"
            )
        only_seen = name in only_read or not hasattr(func, "_schema")
        return (whole := unit.logical(value.local())).to(value.dtype if only_seen else whole.dtype)

    whole = [materialised(a, name) for a, name in zip(args, names, strict=False)]
    named = {k: materialised(v, k) for k, v in kwargs.items()}
    changed = changed_by(func, args)
    if changed is None:
        return func(*whole, **named)
    func(*[as_kept(v, changed.unit) for v in whole], **{k: as_kept(v, changed.unit) for k, v in named.items()})
    return changed


def _norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    gradient, context = args[0], args[0]._unit.context
    bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    dims = bound.get("dim")
    parts = bool(gradient.unit.tiles)
    if context.size == 1 and not parts:
        return func(gradient.borrow().to(gradient.norm_dtype), *args[1:], **kwargs)
    if (dims is not None and len(dims) not in (0, gradient.dim())) or bound.get("keepdim"):
        return _whole(func, args, kwargs)
    order = bound.get("ord", bound.get("p", 2))
    return global_norms([gradient], 2.0 if order is None else order, bound.get("dtype"))[0]


def _foreach_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    order, dtype = bound.get("ord", 2), bound.get("dtype")
    sharded = [g for g in args[0] if isinstance(g, ShardedGradient)]
    if sharded[0]._unit.context.size == 1 and not any(g.unit.tiles for g in sharded):

        def read(g: torch.Tensor) -> torch.Tensor:
            return g.borrow().to(g.norm_dtype) if isinstance(g, ShardedGradient) else g

        if all(g.away is None and g.norm_dtype == g.kept_dtype for g in sharded):
            return func([read(g) for g in args[0]], *args[1:], **kwargs)
        return [func([read(g)], *args[1:], **kwargs)[0] for g in ahead(args[0])]
    norms = iter(global_norms(sharded, order, dtype))
    return [next(norms) if isinstance(g, ShardedGradient) else torch.linalg.vector_norm(g, order, dtype=dtype) for g in args[0]]


def _unscale(func: Any, args: Sequence[Any]) -> None:
    gradients, found_inf, inverse_scale = args

    def unscale(value: torch.Tensor) -> None:
        if value.numel():
            func([value], found_inf, inverse_scale)

    for gradient in ahead(gradients):
        if isinstance(gradient, ShardedGradient):
            valid = gradient.unit.valid  # padding may hold anything
            if comes_in_parts(gradient):
                change_parts(gradient, lambda tile, part: unscale(part[: tile.valid]))
            else:
                gradient.change(lambda shard, valid=valid: unscale(shard[:valid]), elementwise=False)  # type: ignore[misc]
        else:
            unscale(gradient)
    context = next(g for g in gradients if isinstance(g, ShardedGradient))._unit.context
    if context.size > 1:
        everyone = context.agree(["GradScaler: are all gradients finite"], what="unscaling", value=float(found_inf))
        found_inf.fill_(max(everyone))


_NORMS: dict[str, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "_foreach_norm": _foreach_norm,
}
