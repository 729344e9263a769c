"""Norms of gradients that have left their device: who asks for them in each step gets those that were taken before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zinf_compile.runtime.memory.leaving_norms import Norms
from zinf_compile.runtime.units.unit import Tile

from .gradient import ShardedGradient


def of_operator(func: Callable[..., Any], rest: Sequence[Any], kwargs: Mapping[str, Any], *, foreach: bool = False) -> Norms:
    """Return the norms that an operator takes of whole gradients on one rank, with its further arguments."""

    given = next((each for each in (*rest, *kwargs.values()) if isinstance(each, torch.dtype)), None)

    def dtype_of(unit: Any, kept: torch.dtype) -> torch.dtype | None:
        cast = torch.promote_types(unit.dtype, kept) != kept or kept.is_complex
        return None if cast or isinstance(unit, Tile) else given or kept

    def take(unit: Any, shard: torch.Tensor, out: torch.Tensor) -> None:
        value = unit.logical(shard)
        out.copy_(func([value], *rest, **kwargs)[0] if foreach else func(value, *rest, **kwargs))

    return Norms(f"{func} {list(rest)} {dict(kwargs)}", dtype_of, take)


def of_parts(order: float, dtype: torch.dtype | None, *, of_one: bool = False) -> Norms:
    """Return the norms of this rank's elements of gradients, and of tiles; `of_one`: of gradients that are whole on one rank."""

    def dtype_of(unit: Any, kept: torch.dtype) -> torch.dtype | None:
        is_one = unit.shard_group.size == 1 and not isinstance(unit, Tile)
        return None if is_one != of_one or kept.is_complex else dtype or torch.promote_types(unit.dtype, kept)

    def take(unit: Any, shard: torch.Tensor, out: torch.Tensor) -> None:
        part_norm(shard[: unit.valid], order, out.dtype, out=out)

    return Norms(("parts", order, dtype, of_one), dtype_of, take)


def part_norm(valid: torch.Tensor, order: float, dtype: torch.dtype | None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of some elements, perhaps none, in a type; None: their own."""
    if valid.numel():
        wanted = None if dtype == valid.dtype else dtype
        return torch.linalg.vector_norm(valid, order, dtype=wanted, out=out)
    empty = math.inf if order == -math.inf else 0.0
    return valid.new_tensor(empty) if out is None else out.fill_(empty)


def norms_before(gradient: ShardedGradient, norms: Norms) -> list[torch.Tensor] | None:
    """Return the norm of a gradient, or of each of its tiles, as it was before it left; None: it is to be read.

    Whoever asks for a gradient that is not on the device has the next backwards take such norms.
    """
    offloaded = gradient.offloaded
    if offloaded is None:
        return None
    gradient.unit.context.leaving_norms.want(norms)
    return offloaded.norms_of(norms.key)


def foreach_norms(
    func: Callable[..., Any], gradients: Sequence[torch.Tensor], rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[torch.Tensor]:
    """Return the norms that an operator for many tensors takes of gradients on one rank, some of them partitioned, not tiled."""
    sharded = [g for g in gradients if isinstance(g, ShardedGradient)]
    if all(g.offloaded is None and g.norm_dtype == g.kept_dtype for g in sharded):
        return func([g.borrow() if isinstance(g, ShardedGradient) else g for g in gradients], *rest, **kwargs)
    asked = of_operator(func, rest, kwargs, foreach=True)
    before = [norms_before(g, asked) if isinstance(g, ShardedGradient) else None for g in gradients]
    values = _borrowed([g for g, norms in zip(gradients, before, strict=True) if norms is None])

    def norm_of(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cast = value.to(gradient.norm_dtype) if isinstance(gradient, ShardedGradient) else value
        return func([cast], *rest, **kwargs)[0]

    return [
        norm_of(gradient, next(values)) if norms is None else norms[0].clone()
        for gradient, norms in zip(gradients, before, strict=True)
    ]


def _borrowed(gradients: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield whole gradients on the device, each to be read and dropped; the next one is brought if there is room for both."""

    def start(each: Any, *, early: bool) -> Callable[[], torch.Tensor]:
        return each.start_borrowing(early=early) if isinstance(each, ShardedGradient) else lambda: each

    if not gradients:
        return
    if not gradients:
        return
    ready = start(gradients[0], early=False)
    for following in gradients[1:]:
        now, ready = ready, start(following, early=True)
        yield now()
    yield ready()
