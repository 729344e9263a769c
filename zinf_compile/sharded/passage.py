"""What passes through host memory besides a graph's own schedule: gradients that are read back, blocks that are staged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Placement, Topology
from zinf_compile.runtime.storage.extent_store import BLOCK_BYTES
from zinf_compile.runtime.units import pieces

_PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Passage:
    """The least, in bytes."""

    leaving: int = 0
    """Of one gradient, or a tile's, on its way to a drive."""
    read: int = 0
    """Of two gradients, or tiles', while one is added to the other. A norm reads one."""
    on_device: int = 0
    """Of one that a device with memory of its own takes the norm of."""
    staging: int = 0
    """Of one block that doesn't begin or end at a page."""


def measure_passage(slots: Sequence[ParameterSlot], placement: Placement, *, size: int, unified: bool) -> Passage:
    """Add up what the parameters of a captured graph need of it, on each of `size` ranks."""
    moving = [slot for slot in slots if slot.shape and slot.numel]
    trained = [slot for slot in moving if slot.requires_grad]
    away = Topology(unified).is_away(placement.grads)
    parts = [(slot, format_of(placement.reduce_dtype_of(slot.dtype)).bytes(_part_numel(slot, size))) for slot in trained if away]
    largest = max((count for _, count in parts), default=0)
    whole = max((count for slot, count in parts if not slot.tiles), default=0)
    on_drives = [(slot, slot.dtype) for slot in moving if not placement.params.in_memory]
    on_drives += [(slot, placement.reduce_dtype_of(slot.dtype)) for slot in trained if not placement.grads.in_memory]
    return Passage(
        leaving=0 if placement.grads.in_memory else largest,
        read=2 * largest,
        on_device=whole if size == 1 and not unified else 0,
        staging=max((_block_bytes(slot, dtype, size) for slot, dtype in on_drives), default=0),
    )


def _part_numel(slot: ParameterSlot, size: int) -> int:
    parts = [slot.cut(number) for number in range(len(slot.tiles))] or [slot]
    return max(math.ceil(part.numel / size) for part in parts)


def _block_bytes(slot: ParameterSlot, dtype: torch.dtype, size: int) -> int:
    piece = format_of(dtype).bytes(min(math.ceil(slot.numel / size), pieces.PIECE_NUMEL))
    return min(BLOCK_BYTES, -(-piece // _PAGE) * _PAGE)
