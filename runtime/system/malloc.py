"""Settings of glibc's allocator: freed blocks go back to the system where memory is short."""

from __future__ import annotations

import ctypes
import os

LARGE_BYTES = 8 << 20
"""From this size on a block is mapped by itself, and unmapped when it is freed, where nothing asks for a smaller one.

By default glibc raises that limit to up to 32 MiB as such blocks are freed. They then come from its heap, smaller ones settle
between them, and what is free there adds up to as much again as what is used. Before 2.38 that is so even of blocks of one size:
an aligned block never goes to the place of another, as it might need some bytes more."""

SMALLEST = 128 << 10
"""The threshold with which glibc begins: smaller blocks are not worth a call of the kernel."""

_M_MMAP_THRESHOLD = -3
_OURS = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which the user has decided."""


_from = LARGE_BYTES


def return_large_blocks(within: int | None = None) -> None:
    """Let what is freed in large blocks go back to the system at once. Does nothing where the C library isn't glibc.

    `within` is how many bytes are there in all: where they are few, blocks of a 64th of them are large; else nothing changes.
    """
    global _from  # noqa: PLW0603  (so is the C library's setting)
    if within is not None and within // 64 >= LARGE_BYTES:
        return
    _from = min(_from, LARGE_BYTES if within is None else max(within // 64, SMALLEST))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _OURS):
        mallopt(_M_MMAP_THRESHOLD, _from)


def return_free_memory() -> None:
    """Give back what is free between blocks in use. Does nothing where the C library isn't glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
