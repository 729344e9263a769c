"""Sums, norms, extremes and comparisons of tensors that are partitioned alike, the same on all ranks. Collective operations."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf_compile.runtime.units.shard_layout import DenseLayout
from zinf_compile.runtime.units.shard_values import ShardValues, pieces_of

from .gradient import ShardedGradient
from .gradient_norms import combine_norms
from .operands import gradient_values, shard_of
from .shard_pieces import Pieces, over_pieces
from .tensor import ShardedTensor, first_sharded

_Combine = Callable[[torch.Tensor], torch.Tensor]


def _sum(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:  # in the order of pieces and ranks
        total += part
    return total


REDUCTIONS: dict[str, tuple[_Combine, float]] = {
    "all": (lambda parts: parts.amin(0), 1.0),
    "amax": (lambda parts: parts.amax(0), -math.inf),
    "amin": (lambda parts: parts.amin(0), math.inf),
    "any": (lambda parts: parts.amax(0), 0.0),
    "count_nonzero": (_sum, 0.0),
    "dot": (_sum, 0.0),
    "equal": (lambda parts: parts.amin(0), 1.0),
    "linalg_vector_norm": (combine_norms, 0.0),  # type: ignore[dict-item]  # takes the order of the norm besides
    "max": (lambda parts: parts.amax(0), -math.inf),
    "mean": (_sum, 0.0),
    "min": (lambda parts: parts.amin(0), math.inf),
    "norm": (combine_norms, 0.0),  # type: ignore[dict-item]
    "sum": (_sum, 0.0),
    "vdot": (_sum, 0.0),
}
"""Operators by name: how the results of pieces and ranks, doubles, make one; and the result for no elements."""

_TWO = frozenset(["dot", "equal", "vdot"])


def reduce(func: Any, packet: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Perform a reduction over all elements; refuse one over some of the dimensions."""
    owner = first_sharded((args, kwargs))
    assert owner is not None, "it was called for one"
    bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    dims = bound.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if (dims is not None and len(dims) not in (0, owner.dim())) or bound.get("keepdim") or bound.get("out") is not None:
        owner.refuse(packet, "it is taken over some dimensions only, or keeps them", answered_by_whole=bound.get("out") is None)
    if dims is not None and packet in ("all", "any", "max", "min"):
        owner.refuse(packet, "it is taken over a dimension", answered_by_whole=True)
    if packet == "equal" and tuple(args[0].shape) != tuple(args[1].shape):
        return False
    others = args[1:2] if packet in _TWO else ()
    if packet not in _TWO and not isinstance(args[0], ShardedTensor):
        owner.refuse(packet)
    operands = {index: _values(value, owner, packet) for index, value in enumerate([*args[:1], *others])}
    rest = args[1 + len(others) :]
    order = bound.get("ord", bound.get("p", 2)) if packet in ("linalg_vector_norm", "norm") else None
    order = 2.0 if order is None and packet in ("linalg_vector_norm", "norm") else order
    result, whole = _local(func, packet, operands, owner, rest, kwargs, order)
    if not whole:
        ranks = owner.unit.ranks.exchange(result.reshape(1), what=owner.describe(packet)[0])
        result = _combine(packet, ranks, order)
        if packet == "mean":
            result = result / owner.numel()
        result = _typed(result, func, packet, owner, rest, kwargs)
    return bool(result) if packet == "equal" else result


def norms_of_all(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the norms of a list of tensors, those that are partitioned after one exchange for all of them."""
    bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    order, dtype = float(bound.get("ord", 2)), bound.get("dtype")
    norm = torch.ops.aten.linalg_vector_norm.default
    found: list[Any] = []
    pending: list[tuple[int, ShardedTensor, torch.Tensor]] = []
    for index, value in enumerate(args[0]):
        if isinstance(value, ShardedGradient):
            value = ShardedTensor(gradient_values(value), value.shape, value.stride())  # noqa: PLW2901
        if not isinstance(value, ShardedTensor):
            found.append(torch.linalg.vector_norm(value, order, dtype=dtype))
            continue
        named = {"dtype": dtype}
        result, whole = _local(norm, "linalg_vector_norm", {0: value.shard_values}, value, [order], named, order)
        found.append(result)
        if not whole:
            pending.append((index, value, result))
    if pending:
        lines = [line for _, value, _ in pending for line in value.describe("_foreach_norm")]
        what = f"{lines[0]} and others, {zlib.crc32(' '.join(lines).encode()):08x}"
        ranks = pending[0][1].unit.ranks.exchange(torch.stack([result for _, _, result in pending]), what=what)
        for (index, value, _), norms in zip(pending, combine_norms(ranks, order), strict=True):
            found[index] = _typed(norms, norm, "linalg_vector_norm", value, [order], {"dtype": dtype})
    return found


def _values(value: Any, owner: ShardedTensor, packet: str) -> ShardValues:
    values = shard_of(value, owner, packet)
    if values is None:
        owner.refuse(packet)
    return values


def _local(
    func: Any,
    packet: str,
    operands: dict[int, ShardValues],
    owner: ShardedTensor,
    rest: Sequence[Any],
    kwargs: dict[str, Any],
    order: float | None,
) -> tuple[torch.Tensor, bool]:
    """Return this rank's part of the result, a double, and False; or the result itself, where one piece is all there is."""
    unit = owner.unit
    resident = {key: values.resident for key, values in operands.items()}
    there = all(shard is not None for shard in resident.values())
    with torch.no_grad():
        if unit.shard_group.size == 1 and (there or len(pieces_of(unit)) == 1):
            pieces: Pieces = resident if there else {k: v.fetch(0, unit.shard_numel)() for k, v in operands.items()}  # type: ignore[assignment]
            dense = DenseLayout(owner.shape, owner.stride(), owner.dtype, owner.device)
            result = func(*[dense.logical(piece) for piece in pieces.values()], *rest, **kwargs)
            return (result.to(owner.device) if isinstance(result, torch.Tensor) else result), True
        parts: list[torch.Tensor] = []

        def take(pieces: Pieces, start: int, end: int) -> None:
            valid = [piece[: max(0, min(end, unit.valid) - start)] for piece in pieces.values()]
            parts.append(_of_part(func, packet, valid, rest, kwargs, order))

        if there:
            take(resident, 0, unit.shard_numel)  # type: ignore[arg-type]
        else:
            over_pieces(unit, operands, take)
        if not parts:
            parts.append(torch.tensor(_empty(packet, order), dtype=torch.float64))
        return (parts[0] if len(parts) == 1 else _combine(packet, torch.stack(parts), order)), False


def _of_part(
    func: Any, packet: str, valid: Sequence[torch.Tensor], rest: Sequence[Any], kwargs: dict[str, Any], order: float | None
) -> torch.Tensor:
    if not valid[0].numel():
        return torch.tensor(_empty(packet, order), dtype=torch.float64)
    if packet == "equal":
        return torch.tensor(float(torch.equal(*valid)), dtype=torch.float64)
    if order is not None:
        return torch.linalg.vector_norm(valid[0], order, dtype=kwargs.get("dtype")).double().cpu()
    if packet in _TWO:
        return func(*valid).double().cpu()
    simple = getattr(torch, "sum" if packet == "mean" else packet)
    dtype = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {}
    return simple(valid[0], **dtype).double().cpu()


def _combine(packet: str, parts: torch.Tensor, order: float | None) -> torch.Tensor:
    if order is not None:
        return combine_norms(parts, order).reshape(())
    combine, _ = REDUCTIONS[packet]
    return combine(parts).reshape(())


def _empty(packet: str, order: float | None) -> float:
    return math.inf if order == -math.inf else REDUCTIONS[packet][1]


def _typed(
    result: torch.Tensor, func: Any, packet: str, owner: ShardedTensor, rest: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return a result in the type that the operator gives, on the tensor's device."""
    example = torch.ones(1, dtype=owner.dtype)
    if packet == "equal":
        return result
    made = func(example, example) if packet in _TWO else func(example, *_no_dims(func, rest), **kwargs)
    return result.to(device=owner.device, dtype=made.dtype)


def _no_dims(func: Any, rest: Sequence[Any]) -> list[Any]:
    names = [a.name for a in func._schema.arguments][1:]
    return [[] if name == "dim" else value for name, value in zip(names, rest, strict=False)]
