"""What `GradScaler` does to partitioned gradients: unscaling them, and whether all are finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zinf_compile.errors import RankMismatchError

from .gradient import ShardedGradient
from .tiled_gradient_ops import change_parts, is_loaded_by_tile


def unscale(func: Any, args: Sequence[Any]) -> None:
    """Unscale gradients; `found_inf` says of all ranks whether some are not finite. An error of one rank is one on all."""
    gradients, found_inf, inverse_scale = args
    unit = next(g for g in gradients if isinstance(g, ShardedGradient)).unit
    error: BaseException | None = None
    here = 0.0
    try:
        _unscale_own(func, gradients, found_inf, inverse_scale)
        here = float(found_inf) if unit.shard_group.size > 1 else here
    except BaseException as raised:  # an interrupt too: the others are about to wait here
        error, here = raised, math.inf
    if unit.shard_group.size > 1:
        everyone = unit.ranks.agree(["GradScaler: are all gradients finite"], what="unscaling", value=here)
        failed = [rank for rank, value in enumerate(everyone) if value == math.inf]
        if failed and error is None:
            raise RankMismatchError(
                f"unscaling gradients failed on rank {failed[0]}, see there; some are unscaled, others are not: drop them with "
                "optimizer.zero_grad() on all ranks"
            )
        if error is None:
            found_inf.fill_(max(everyone))
    if error is not None:
        raise error


def _unscale_own(func: Any, gradients: Sequence[Any], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscale this rank's elements."""
    by_device = {found_inf.device: (found_inf, inverse_scale)}  # gradients off the device are unscaled where they are

    def scale(value: torch.Tensor) -> None:
        if value.device not in by_device:
            by_device[value.device] = torch.zeros_like(found_inf, device=value.device), inverse_scale.to(value.device)
        if value.numel():
            func([value], *by_device[value.device])

    for gradient in _in_turn(gradients):
        if isinstance(gradient, ShardedGradient):
            valid = gradient.unit.valid  # padding may hold anything
            if is_loaded_by_tile(gradient):
                change_parts(gradient, lambda tile, part: scale(part[: tile.valid]), "GradScaler.unscale_")
            elif gradient.on_host is not None:
                with gradient.unit.context.lanes.meter.waiting():
                    gradient.on_host.change_now(lambda shard, valid=valid: scale(shard[:valid]))  # type: ignore[misc]
            else:
                gradient.change(lambda shard, valid=valid: scale(shard[:valid]), elementwise=False)  # type: ignore[misc]
        else:
            scale(gradient)
    for elsewhere, _ in by_device.values():
        if elsewhere is not found_inf:
            torch.maximum(found_inf, elsewhere.to(found_inf.device), out=found_inf)


def _in_turn(gradients: Sequence[Any]) -> Iterator[Any]:
    """Yield gradients; the next one, where it is off the device, is prefetched if there is room for both."""
    for gradient, following in itertools.zip_longest(gradients, gradients[1:]):
        for each in (gradient, following):
            if isinstance(each, ShardedGradient) and not is_loaded_by_tile(each):
                each.prepare(early=each is following)
        yield gradient
