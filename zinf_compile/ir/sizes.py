"""Sizes of the buffers that the runtime makes and the memory model counts, and bytes by where they are."""

from __future__ import annotations

import re
from typing import NamedTuple

from zinf_compile.errors import OptionError

PAGE = 4096
"""Bytes. Direct I/O moves whole pages."""

BLOCK_BYTES = 4 << 20
"""Of a drive's store: checked, and staged, as one."""

SMALL_BYTES = 128 << 10
"""Of a drive's store: extents of at most so many bytes lie in rows, and are moved together. To copy one takes less time than a
request of its own."""

SMALL_NUMEL = SMALL_BYTES // 4
"""Of a shard, in elements: those of at most so many are updated first."""

ROW_BYTES = 1 << 20
"""Of a row of small extents, padded: what one request moves at most."""

STAGING_BYTES = 64 << 20
"""Staging that is enough for any drive."""

CHUNK_BUFFERS = 3
"""Chunks in memory: one being read, one being updated, one being written. With two one is written before the next is read."""

UNFORESEEN = 16
"""Of memory that would only make graphs faster, one part in so many stays free: for results and tensors that callers keep, of
which no plan knows."""

PIECE_ALIGN = 4096
"""Pieces lie in a chunk at multiples of this many elements: at a page, whatever their data type."""

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


class Sides(NamedTuple):
    """Bytes of the device, and of host memory beside it; where host memory is the device, all are the device's."""

    device: int
    host: int

    def plus(self, other: Sides) -> Sides:
        """Add side by side."""
        return Sides(self.device + other.device, self.host + other.host)

    def most(self, other: Sides) -> Sides:
        """Return the larger of both on each side."""
        return Sides(max(self.device, other.device), max(self.host, other.host))


def round_up(count: int, multiple: int) -> int:
    """Return the first multiple that is no less than `count`."""
    return -(-count // multiple) * multiple


def parse_bytes(value: int | str, *, option: str) -> int:
    """Turn `"32MiB"` or a number of bytes into bytes; raise `OptionError` naming `option` for anything else."""
    accepted = f"a positive number of bytes or text such as '32MiB' (units: {', '.join(_UNITS)})"
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+(?=\s*[A-Za-z]))?)\s*([A-Za-z]*)\s*", value)
        factor = _UNITS.get(match[2], None if match[2] else 1) if match else None
        if match is None or factor is None:
            raise OptionError(f"option {option}={value!r} is not a size; accepted: {accepted}")
        value = int(float(match[1]) * factor) if match[2] else int(match[1])
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise OptionError(f"option {option}={value!r} is not a size; accepted: {accepted}")
    return value
