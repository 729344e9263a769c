"""A whole parameter as a unit: how its optimizer states are laid out over the ranks, while its value stays whole on each.

Shards begin at multiples of `ALIGNED` elements. Kernels compute what fills no vector in another way, and round otherwise: so
what a rank updates alone is computed as it would be in an update of the whole, and has its bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf_compile.ir.tiers import ON_DEVICE

from .shard_layout import DenseLayout, cut_spans, is_dense
from .unit import Unit

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context


ALIGNED = 64
"""Elements: a multiple of what any processor's vector holds."""

WHOLE = "whole"
"""Mark of the layout of a whole parameter's states, in the note beside them."""


class WholeUnit(Unit):
    """The shape of a unit's shards, without a shard: for what is split of a parameter that no graph gathers.

    It is in no context's list of units and takes no serial number: graphs, norms and accounts of units don't see it.
    """

    def __init__(self, parameter: torch.Tensor, name: str, context: Context) -> None:
        DenseLayout.__init__(self, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        self._unpadded = DenseLayout(parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        self.name = name
        self.context = context
        self._shard_group = context.ranks.shard_group
        self.placement = ON_DEVICE
        self.serial = self.family = -1
        self.boxes = ()
        self.tiles = []
        self.real_numel = self.numel
        """Elements of the parameter; `numel` counts padding too."""
        self.numel = -(-self.numel // (ALIGNED * self.shard_group.size)) * ALIGNED * self.shard_group.size
        self.spans = cut_spans(self.numel, (), self.shard_group.size)
        self.backing = None
        self.updates = None
        self.steps_digest, self.last_step = 0, None  # all ranks take part in its steps

    @property
    def used(self) -> int:
        """Elements of its shard that a rank updates: those of the parameter; one of padding, where it has none."""
        return max(1, min(self.shard_numel, self.real_numel - self.shard_group.rank * self.shard_numel))

    @functools.cached_property
    def layout(self) -> dict[str, Any]:
        """See `Unit.layout`."""
        return {**super().layout, WHOLE: True}

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """Lay a full tensor out flat, with padding."""
        flat = self._unpadded.flat(value)
        return torch.cat([flat, flat.new_zeros(self.numel - self.real_numel)]) if self.numel > self.real_numel else flat


def whole_unit(parameter: nn.Parameter, name: str, context: Context) -> WholeUnit | None:
    """Return the unit of a whole parameter; None for one that isn't dense, of floating point and of one element at least."""
    if parameter.layout != torch.strided or not parameter.is_floating_point() or parameter.dim() == 0 or parameter.numel() == 0:
        return None
    return WholeUnit(parameter, name, context) if is_dense(tuple(parameter.shape), parameter.stride()) else None


def whole_unit_of(parameter: object) -> WholeUnit | None:
    """Return the unit of a whole parameter whose gradient is averaged over the ranks, None for anything else."""
    unit = getattr(parameter, "_zinf_whole", None)
    return unit if isinstance(unit, WholeUnit) else None
