"""Sizes of the buffers that the runtime makes and the memory model counts, and bytes by where they are."""

from __future__ import annotations

from typing import NamedTuple

PAGE = 4096
"""Bytes. Direct I/O moves whole pages."""

BLOCK_BYTES = 4 << 20
"""Of a drive's store: checked, and staged, as one."""

STAGING_BYTES = 64 << 20
"""Staging that is enough for any drive."""

CHUNK_BUFFERS = 3
"""Chunks in memory: one being read, one being updated, one being written. With two one is written before the next is read."""

PIECE_ALIGN = 4096
"""Pieces lie in a chunk at multiples of this many elements: at a page, whatever their data type."""


class Sides(NamedTuple):
    """Bytes of the device, and of host memory beside it; where host memory is the device, all are the device's."""

    device: int
    host: int

    def plus(self, other: Sides) -> Sides:
        """Add side by side."""
        return Sides(self.device + other.device, self.host + other.host)


def round_up(count: int, multiple: int) -> int:
    """Return the first multiple that is no less than `count`."""
    return -(-count // multiple) * multiple
