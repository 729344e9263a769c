"""Largest element, sum and other numbers of whole gradients, from the shards of all ranks; random numbers shaped like them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .gradient import ShardedGradient

_Part = Callable[[torch.Tensor], torch.Tensor]
_Combine = Callable[[torch.Tensor], torch.Tensor]


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(0)


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.amax(0)


def _smallest(values: torch.Tensor) -> torch.Tensor:
    return values.amin(0)


_OF_ONE: dict[str, tuple[_Part, _Combine, float]] = {
    "all": (torch.all, _smallest, 1.0),
    "amax": (torch.amax, _largest, -math.inf),
    "amin": (torch.amin, _smallest, math.inf),
    "any": (torch.any, _largest, 0.0),
    "count_nonzero": (torch.count_nonzero, _sum, 0.0),
    "max": (torch.amax, _largest, -math.inf),
    "mean": (lambda part: part.sum(dtype=torch.float64), _sum, 0.0),
    "min": (torch.amin, _smallest, math.inf),
    "sum": (lambda part: part.sum(dtype=torch.float64), _sum, 0.0),
}
"""By operator: the number of one part, how those of several parts make the one of all, and the number of no elements."""

REDUCTIONS = frozenset([*_OF_ONE, "histc"])
TESTS = frozenset(
    [
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "eq",
        "ge",
        "gt",
        "isfinite",
        "isinf",
        "isnan",
        "isneginf",
        "isposinf",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "ne",
        "signbit",
    ]
)
"""Element-wise, with a result of another type, which is spread over several ranks too; on a single one it is a plain tensor."""
DRAWS = frozenset(["rand_like", "randint_like", "randn_like"])


def reduces_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a reduction is over all elements: no dimension chosen."""
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    return not given.get("dim") and given.get("dim") != 0 and not given.get("keepdim")


def reduce_over_ranks(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return a number (of `histc`, a vector) of a whole gradient, the same on all ranks. A collective operation.

    Sums are taken in double precision, part by part, those of ranks in rank order.
    """
    name = func._schema.name.split("::")[-1]
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    gradient: ShardedGradient = args[0]
    if name == "histc":
        return _histogram(gradient, **{k: v for k, v in given.items() if k != "self"})
    value = _number(gradient, name)
    if name == "mean":
        value = value / gradient.unit.numel if gradient.unit.numel else value + math.nan
    return value.to(device=gradient.device, dtype=given.get("dtype") or _result_type(name, gradient.dtype))


def draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return this rank's part of random numbers drawn for the whole gradient, as eager PyTorch draws them."""
    unit = args[0].unit
    like = torch.empty_strided(unit.shape, unit.stride, dtype=args[0].dtype, device=unit.device)
    whole = func(like, *args[1:], **kwargs)
    del like
    unit.context.memory.ledger.track("staging", whole)
    part: torch.Tensor = unit.local_part(whole)
    return part


def _result_type(name: str, dtype: torch.dtype) -> torch.dtype:
    if name in ("any", "all"):
        return torch.bool
    if name == "count_nonzero" or (name == "sum" and not dtype.is_floating_point):
        return torch.int64
    return dtype


def _number(gradient: ShardedGradient, name: str) -> torch.Tensor:
    of_part, combine, of_none = _OF_ONE[name]
    parts = [of_part(part).double().cpu() for part in _parts(gradient)]
    mine = combine(torch.stack(parts)) if parts else torch.tensor(of_none, dtype=torch.float64)
    return combine(_exchange(gradient, mine.view(1), f"{name}()"))[0]


def _histogram(gradient: ShardedGradient, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    low, high = float(min), float(max)
    if low == high:
        low, high = float(_number(gradient, "amin")), float(_number(gradient, "amax"))
    if low == high:
        low, high = low - 1, high + 1
    mine = torch.zeros(bins, dtype=torch.float64)
    for part in _parts(gradient):
        mine += torch.histc(part, bins, low, high).double().cpu()
    counts = _exchange(gradient, mine, "histc()").sum(0)
    return counts.to(device=gradient.device, dtype=gradient.dtype)


def _parts(gradient: ShardedGradient) -> Iterator[torch.Tensor]:
    return (part for part in gradient.valid_parts() if part.numel())


def _exchange(gradient: ShardedGradient, values: torch.Tensor, what: str) -> torch.Tensor:
    return gradient.unit.ranks.exchange(values, what=f"{what} of the gradient of {gradient.unit.name}")
