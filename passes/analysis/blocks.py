"""Block boundaries of the model, from names, order and sizes of units alone. `align_regions` and `group_units` cut there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zinf_compile.ir.program import ParameterSlot

_BLOCK = re.compile(r"^(?:.*\.)?\d+(?=\.|$)")


def choose_regions(units: Sequence[ParameterSlot], *, region_bytes: int) -> list[int]:
    """Return the position of each region's first unit, given the units in the order of their first use."""
    starts: list[int] = []
    block, size = "", 0
    for position, unit in enumerate(units):
        if not starts or block_of(unit.name) != block or size + unit.bytes > region_bytes:
            starts.append(position)
            block, size = block_of(unit.name), 0
        size += unit.bytes
    return starts


def block_of(name: str) -> str:
    """Return the block of the model that a parameter belongs to: `layers.3` for `layers.3.mlp.up.weight`, "" for none."""
    match = _BLOCK.match(name)
    return match[0] if match else ""
