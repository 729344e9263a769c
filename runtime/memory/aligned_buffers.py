"""Aligned host memory for direct I/O: pinned where an accelerator copies from it, reused, counted and capped."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from zinf_compile._csrc import address_of
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.system.page_locked import LockableMemory, lock, locked_memory, locks_mapped_memory

from .own_storage import with_own_storage

_HUGE_PAGE = 2 << 20


def aligned_buffer(size: int, *, pinned: bool = False) -> torch.Tensor:
    """Allocate `size` bytes that begin at a page: good for direct I/O without copies. Zeroed.

    PyTorch's own pinned allocator rounds sizes up to powers of two; this memory is what was asked for, to a page. Large buffers
    are made of huge pages where the kernel has them: pinning pages for a transfer is most of what direct I/O costs the CPU.
    """
    length = max(mmap.PAGESIZE, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory = private_memory(length, pinned=pinned, aligned=length >= _HUGE_PAGE)
    with torch.inference_mode(False):  # it outlives the mode in which it is first asked for
        return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def zeros_on(device: torch.device, numel: int, dtype: torch.dtype, *, beside: torch.device) -> torch.Tensor:
    """Return zeros on a device; those on the host `beside` an accelerator in memory that this copies from and to by itself."""
    if device.type != "cpu" or beside.type == "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    return with_own_storage(aligned_buffer(format_of(dtype).bytes(numel), pinned=True).view(dtype))


def private_memory(length: int, *, pinned: bool = False, aligned: bool = False) -> memoryview:
    """Map fresh memory of `length` bytes, zeroed; of huge pages where the kernel has them and they fit.

    `pinned`: locked, where the system allows it, so that the accelerator copies from and to it by itself. `aligned`: it begins
    at a huge page, but where the accelerator gives its own; addresses before and after it are mapped for that and take no memory.
    """
    if pinned and not locks_mapped_memory():
        locked = locked_memory(length)
        if locked is not None:
            return locked
        pinned = False  # refused
    memory = LockableMemory(-1, length + (_HUGE_PAGE if aligned else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = memoryview(memory)
    start = -address_of(whole, writable=True) % _HUGE_PAGE if aligned else 0
    if length >= _HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, length)
    part = whole[start : start + length]
    if pinned:
        lock(memory, part)
    return part


class Holder(Protocol):
    """Has a buffer of a pool, and gives it back when it is finished."""

    def finish(self) -> None:
        """Wait for what the buffer is used for; any thread may."""


class BufferPool:
    """Buffers that are handed out, given back and handed out again; several stores may share them.

    Of those that fit the smallest is taken; a new one has the size asked for. Where the cap leaves no room for it, idle ones
    are dropped first; one alone is never too large. `account` is told of each change of `bytes`. Any thread may call.
    """

    def __init__(self, cap_bytes: int, *, pinned: bool = False, account: Callable[[int], None] = lambda change: None) -> None:
        self.cap_bytes = cap_bytes
        self.pinned = pinned
        self.bytes = 0
        """Held now, idle buffers included."""
        self.peak_bytes = 0
        self.lock = threading.RLock()
        """Held directly: a condition is entered in Python, where Ctrl-C may come between locking and the block."""
        self.returned = threading.Condition(self.lock)
        """Notified when a buffer comes back."""
        self.holders: dict[Holder, None] = {}
        """Users of buffers that are under way, the oldest first; another user may finish one."""
        self._idle: list[torch.Tensor] = []
        self._account = account
        self._closed = False

    def limit(self, cap_bytes: int) -> None:
        """Let the pool hold no more than that from now on; idle buffers beyond it are dropped."""
        with self.lock:
            self.cap_bytes = cap_bytes
            while self.bytes > self.cap_bytes and self._idle:
                self._count(-self._idle.pop(0).numel())

    def hold(self, holder: Holder) -> None:
        """Note the user of a buffer that was taken."""
        with self.lock:
            self.holders[holder] = None

    def forget(self, holder: Holder) -> None:
        """Note that it is finished."""
        with self.lock:
            self.holders.pop(holder, None)

    def take(self, size: int) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes, content undefined; None where the cap allows none until one comes back."""
        with self.lock:
            fitting = [buffer for buffer in self._idle if buffer.numel() >= size]
            if fitting:
                best = min(fitting, key=torch.Tensor.numel)
                self._idle = [buffer for buffer in self._idle if buffer is not best]
                return best
            while self.bytes + size > self.cap_bytes and self._idle:
                self._count(-self._idle.pop(0).numel())
            if self.bytes and self.bytes + size > self.cap_bytes:
                return None
            self._count(size)
        try:
            return aligned_buffer(size, pinned=self.pinned)
        except BaseException:
            with self.lock:
                self._count(-size)
            raise

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back what `take` returned; nothing may use it any more."""
        with self.lock:
            if self._closed:
                return
            self._idle.append(buffer)
            self.returned.notify_all()

    def lose(self, buffer: torch.Tensor) -> None:
        """Do without a buffer that was taken and that nobody may use again."""
        with self.lock:
            if self._closed:
                return
            self._count(-buffer.numel())
            self.returned.notify_all()

    def clear(self) -> None:
        """Drop the idle buffers."""
        with self.lock:
            self._count(-sum(buffer.numel() for buffer in self._idle))
            self._idle.clear()

    def close(self) -> None:
        """Count nothing any more: whoever still has a buffer keeps it."""
        with self.lock:
            self._count(-self.bytes)
            self._idle.clear()
            self._closed = True

    def _count(self, change: int) -> None:
        self.bytes += change
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self._account(change)
