"""Host memory that is locked into place, from which an accelerator copies by itself, beside compute.

A system may refuse: then the memory is ordinary, copies wait for the CPU, and a warning says so once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import mmap
import os
import resource
import sys
from collections.abc import Callable

import torch

from .process_wide import process_wide

_log = logging.getLogger("zinf_compile")

_TOUCHED_BYTES = 256 << 20
"""Fresh pages that one thread makes the system find at a time: most of what locking memory takes is that."""

_PORTABLE = 1
"""Flag of `cudaHostRegister`: locked for all devices of the process, whichever is current on this thread."""

_told: set[str] = process_wide(set())
"""Warnings that this process was given."""


def locks_mapped_memory() -> bool:
    """Return whether memory of ours can be locked where it is, by `lock`; else the accelerator gives its own."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is None or accelerator.type == "cuda"


def locked_memory(length: int) -> memoryview | None:
    """Return fresh, zeroed memory of whole pages, locked, which begins at a page; None where the system refuses."""
    try:
        memory = torch.empty(length, dtype=torch.uint8, pin_memory=True)
        if memory.data_ptr() % mmap.PAGESIZE:  # an allocator that aligns to less
            memory = torch.empty(length + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warn_of_refusal(length, str(error))
        return None
    start = -memory.data_ptr() % mmap.PAGESIZE
    memory.zero_()
    return memoryview(memory.numpy().data)[start : start + length]  # holds the tensor


class LockableMemory(mmap.mmap):
    """Mapped memory that may be locked. It is unlocked before it is unmapped: an `mmap` tells weak references only afterwards."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None and not sys.is_finalizing():
            self.unlock()


def lock(memory: LockableMemory, part: memoryview) -> None:
    """Lock a part of mapped memory for CUDA or ROCm until it is unmapped; other accelerators lock their own: `locked_memory`.

    PyTorch's own allocator of such memory rounds sizes up to powers of two; this is what was asked for.
    """
    pages = torch.frombuffer(part, dtype=torch.uint8)
    touch(pages)
    runtime, address = torch.cuda.cudart(), pages.data_ptr()
    code = int(runtime.cudaHostRegister(address, len(part), _PORTABLE))
    if not code:
        memory.unlock = functools.partial(runtime.cudaHostUnregister, address)
        return
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # the next kernel is told of the error: this one
    warn_of_refusal(len(part), f"cudaHostRegister returned {code}")


def touch(memory: torch.Tensor) -> None:
    """Have the system find a page for each of these addresses, on all cores; bytes that were not zero are lost."""
    pages = memory[:: mmap.PAGESIZE]
    parts = pages.split(max(1, _TOUCHED_BYTES // mmap.PAGESIZE))
    if len(parts) == 1:
        pages.zero_()
        return
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)), "zinf touch") as threads:
        list(threads.map(torch.Tensor.zero_, parts))


def warn_of_refusal(length: int, why: str) -> None:
    """Warn, once, that memory isn't locked, and say what that costs."""
    if "locked" in _told:
        return
    _told.add("locked")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    _log.warning(
        "the system refuses to lock %s bytes of host memory (%s; `ulimit -l`: %s). Training goes on: copies to and from the "
        "device are slower, about half as fast on PCIe, and compute waits for them. Raise `ulimit -l`, or the container's memory",
        f"{length:,}", why, allowed,
    )  # fmt: skip
