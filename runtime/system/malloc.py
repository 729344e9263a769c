"""Settings of glibc's allocator: what is freed goes back to the system where memory is short, and stays where the next step has
room to use it again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

LARGE_BYTES = 8 << 20
"""From this size on a block is mapped by itself, and unmapped when it is freed, where nothing asks for a smaller one.

By default glibc raises that limit to up to 32 MiB as such blocks are freed. They then come from its heap, smaller ones settle
between them, and what is free there adds up to as much again as what is used. Before 2.38 that is so even of blocks of one size:
an aligned block never goes to the place of another, as it might need some bytes more."""

SMALLEST = 128 << 10
"""The threshold with which glibc begins: smaller blocks are not worth a call of the kernel."""

LARGEST = 32 << 20
"""The highest threshold that glibc accepts, and what it raises the threshold to by itself."""

_KEPT_ANYWAY, _MOST_KEPT = 2 * LARGEST, (1 << 31) - 1
"""Free bytes at the end of its heap: what glibc may keep by itself, twice the threshold; the most that it can be told to keep."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED, _TRIMMED = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"), ("MALLOC_TRIM_THRESHOLD_",)
"""Variables by which the user has decided."""


_from: int | None = None
"""The size of large blocks that are mapped by themselves; None: nothing has asked for that."""
_kept: int | None = None
"""The free bytes that glibc was told to keep; None: it decides."""


def return_large_blocks(within: int | None = None) -> None:
    """Let what is freed in large blocks go back to the system at once. Does nothing where the C library isn't glibc.

    `within` is how many bytes are there in all: where they are few, blocks of a 64th of them are large; else nothing changes.
    """
    global _from, _kept  # noqa: PLW0603  (so are the C library's settings)
    if within is not None and within // 64 >= LARGE_BYTES:
        return
    _from = min(_from or LARGE_BYTES, LARGE_BYTES if within is None else max(within // 64, SMALLEST))
    mallopt = _mallopt(*_MAPPED)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _from)
        if _kept is not None:
            _kept = None
            mallopt(_M_TRIM_THRESHOLD, 2 * _from)


def keep_free_memory(wanted: int, *, room: int) -> None:
    """Let `wanted` bytes that are free at the end of the heap stay with the process, as far as there is `room` for them.

    By default glibc gives back what is free there as soon as it is more than twice the largest block: where a step frees its
    gradients, all of them, and the next step takes them again page by page, each page a fault. Does nothing where large blocks
    go back to the system, or where the C library isn't glibc.
    """
    global _kept  # noqa: PLW0603
    if _from is not None or (_kept is None and room < _KEPT_ANYWAY):
        return
    count = min(max(min(wanted + wanted // 8, room), _KEPT_ANYWAY), _MOST_KEPT)  # an eighth for what lies between blocks
    mallopt = _mallopt(*_MAPPED, *_TRIMMED) if count != _kept else None
    if mallopt is not None:
        _kept = count
        mallopt(_M_MMAP_THRESHOLD, LARGEST)  # either setting ends what glibc does by itself about both
        mallopt(_M_TRIM_THRESHOLD, count)


def _mallopt(*variables: str) -> Callable[[int, int], int] | None:
    """Return the function that changes settings; None without glibc, or where the user has set one of these variables."""
    found: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    return None if any(name in os.environ for name in variables) else found


def return_free_memory() -> None:
    """Give back what is free between blocks in use. Does nothing where the C library isn't glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
