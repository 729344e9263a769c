"""What a unit's placement says of its gradient, and of full copies of it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from zinf_compile.ir.formats import StateFormat, format_of
from zinf_compile.ir.tiers import Placement
from zinf_compile.ir.tiling import Box

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context


class Placed:
    """The part of a `Unit` that answers for it. A unit keeps its placement, so that answers are computed once."""

    context: Context
    placement: Placement
    numel: int
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @property
    def shard_numel(self) -> int:
        """See `Unit.shard_numel`."""
        raise NotImplementedError

    @functools.cached_property
    def reduce_dtype(self) -> torch.dtype:
        """The type in which its gradient is reduced over ranks, added up and kept until the step."""
        return self.placement.reduce_dtype_of(self.dtype)

    @property
    def reduce_format(self) -> StateFormat:
        """The format in which its gradient is sent, added up and kept."""
        return format_of(self.reduce_dtype)

    @property
    def reduced_at_step(self) -> bool:
        """Whether its gradient is kept whole until the step."""
        return self.placement.reduces_at_step(self.numel, self.shard_numel, tiled=bool(self.boxes))

    @property
    def gradient_numel(self) -> int:
        """The elements that this rank holds of its gradient: the shard's, and all where it is kept whole until the step."""
        return self.placement.gradient_numel(self.numel, self.shard_numel, tiled=bool(self.boxes))

    @functools.cached_property
    def gradient_bytes(self) -> int:
        """The bytes that these elements take."""
        return self.reduce_format.bytes(self.gradient_numel)

    @functools.cached_property
    def full_copy_numel(self) -> int:
        """The elements of a full copy that stays on the device until the unit changes, see `FullCopies`; 0: none does."""
        if self.placement.reshard_after_backward:
            return 0
        topology = self.context.link.topology
        return self.placement.full_copy_numel(self.numel, self.shard_numel, topology, tiled=bool(self.boxes))
