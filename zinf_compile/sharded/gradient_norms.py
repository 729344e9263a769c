"""Norms of whole gradients from the shards of all ranks, for all gradients of a model in one exchange."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.units.unit import Unit

from .gradient import ShardedGradient
from .left_norms import norms_before, of_parts, part_norm

_Settings = tuple[float, torch.dtype | None]


class _Known:
    """The last norms taken over some ranks."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.by_shard: dict[int, tuple[weakref.ref[object], int, float]] = {}

    def still_there(self) -> dict[int, tuple[weakref.ref[object], int, float]]:
        """Return the norms kept of gradients that still exist."""
        return {key: known for key, known in self.by_shard.items() if known[0]() is not None}

    def recall(self, gradients: Sequence[ShardedGradient]) -> list[float] | None:
        """Return the norms, if all are known and no gradient was changed since."""
        norms = []
        for gradient in gradients:
            shard, changes = gradient.state()
            reference, version, norm = self.by_shard.get(id(shard), (None, 0, 0.0))
            if reference is None or reference() is not shard or version != changes:
                return None
            norms.append(norm)
        return norms


_known: weakref.WeakKeyDictionary[Context, _Known] = process_wide(weakref.WeakKeyDictionary())


def global_norms(gradients: Sequence[ShardedGradient], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the norm of each whole gradient, the same on all ranks. A collective operation.

    `clip_grad_norm_` asks for one gradient after the other. The first question is answered at once for all parameters that were
    partitioned together with these, and the next ones from memory, as long as no gradient was changed. (Not for all that there
    are: when a model that nobody uses any more is collected differs from rank to rank.) Combined in double precision, in rank
    order.
    """
    context = gradients[0].unit.context
    if any(gradient.unit.context is not context for gradient in gradients):
        raise PartitionedParameterError(
            "norms of gradients that are partitioned over different process groups can't be taken together: clip each model's "
            "parameters by themselves"
        )
    settings = (float(order), dtype)
    known = _known.get(context)
    norms = known.recall(gradients) if known is not None and known.settings == settings else None
    if norms is None:
        model = _gradients_of(context, {gradient.unit.family for gradient in gradients})
        held = {id(gradient.state()[0]) for gradient in model}
        together = model if all(id(gradient.state()[0]) in held for gradient in gradients) else gradients
        known = _take(context, settings, together)
        norms = known.recall(gradients)
        if (before := _known.get(context)) is not None and before.settings == settings:
            known.by_shard = before.still_there() | known.by_shard
        _known[context] = known
    assert norms is not None, "the norms were taken a moment ago"
    return [
        _number_on(gradient.device, norm, dtype or gradient.norm_dtype) for norm, gradient in zip(norms, gradients, strict=True)
    ]


def _number_on(device: torch.device, number: float, dtype: torch.dtype) -> torch.Tensor:
    rounded = torch.tensor(number, dtype=torch.float64).to(dtype)
    return rounded if device.type == "cpu" else torch.full((), rounded.item(), dtype=dtype, device=device)  # no copy: no wait


def _gradients_of(context: Context, families: set[int]) -> list[ShardedGradient]:
    found: list[ShardedGradient] = []
    for unit in sorted((unit for unit in context.units if unit.family in families), key=lambda unit: unit.serial):
        parameter = unit.parameter()
        gradient = parameter.grad if parameter is not None else None
        asks = not _is_one(unit)  # else its norm is that of one tensor, for which nobody needs the others
        if isinstance(gradient, ShardedGradient) and gradient.unit is unit and asks:
            found.append(gradient)
    return found


def _is_one(unit: Unit) -> bool:
    """Say whether a unit's gradient is one tensor, on one rank."""
    return unit.shard_group.size == 1 and not unit.tiles


def _take(context: Context, settings: _Settings, gradients: Sequence[ShardedGradient]) -> _Known:
    order, dtype = settings
    asked = {of_one: of_parts(order, dtype, of_one=of_one) for of_one in (False, True)}
    before = [norms_before(gradient, asked[_is_one(gradient.unit)]) for gradient in gradients]
    to_read = iter([gradient for gradient, norms in zip(gradients, before, strict=True) if norms is None])
    following, local = next(to_read, None), []
    for gradient, taken in zip(gradients, before, strict=True):
        if taken is None:
            following = next(to_read, None)
            for each in (gradient, following):
                if each is not None and not (each.unit.tiles and each.offloaded is not None):  # else parts are loaded one by one
                    each.prepare(early=each is following)
        found = taken or [part_norm(valid, order, dtype or gradient.norm_dtype) for valid in gradient.parts_on_device()]
        norms = [norm.double() for norm in found]
        local.append(norms[0] if len(norms) == 1 else combine_norms(torch.stack(norms), order))
    known = _Known(settings)
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, gradient in enumerate(gradients):
        groups.setdefault(gradient.unit.shard_group.partition, []).append(number)
    for members in groups.values():
        unit = gradients[members[0]].unit
        ranks = unit.ranks.exchange(_stacked([local[n] for n in members]), what=f"norm of the gradient of {unit.name}")
        for number, norm in zip(members, combine_norms(ranks, order).tolist(), strict=True):
            shard, changes = gradients[number].state()
            known.by_shard[id(shard)] = (weakref.ref(shard), changes, norm)
    return known


def _stacked(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack numbers; those of several devices in host memory, which waits once for each device."""
    places: dict[torch.device, list[int]] = {}
    for number, norm in enumerate(norms):
        places.setdefault(norm.device, []).append(number)
    if len(places) == 1:
        return torch.stack(list(norms))
    out = torch.empty(len(norms), dtype=torch.float64)
    for numbers in places.values():
        out[numbers] = torch.stack([norms[n] for n in numbers]).cpu()
    return out


def combine_norms(norms: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norms of what has these norms, each row of a part."""
    if order == math.inf:
        return norms.amax(0)
    if order == -math.inf:
        return norms.amin(0)
    if order == 0:
        return norms.sum(0)
    return norms.pow(order).sum(0).pow(1 / order)
