"""Reads of file ranges into host memory: from the page cache where they are in it, else past it from the drive.

What the kernel reads for a process that follows it through a file comes at half the rate of a drive that is asked for several
megabytes at a time, and pushes out of memory what others have there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

import torch

from zinf_compile._csrc import address_of
from zinf_compile.runtime.memory.aligned_buffers import BufferPool

from .direct_file import File
from .engine import Engine, Request

_libc = ctypes.CDLL(None, use_errno=True)


class FileRead:
    """Some bytes of a file, in flight to host memory."""

    def __init__(self, engine: Engine, file: File, fd: int, offset: int, size: int, pool: BufferPool) -> None:
        """Start to read what isn't in the page cache: past it, where the filesystem can.

        `fd`: the same file's, buffered. `pool` must have room.
        """
        self._fd, self._offset = fd, offset
        self._pool = pool
        self._buffer: torch.Tensor | None = None
        self._direct: Request | None = None
        self._skip, self._count = offset % file.alignment, 0
        """Bytes that are read before those asked for, past the page cache, and bytes asked for that are read so."""
        self._keeps = is_cached(fd, offset, size)
        if not self._keeps and not file.direct:
            with contextlib.suppress(OSError):  # an advice
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
        if not self._keeps and file.direct:
            first, last = offset - self._skip, -(-(offset + size) // file.alignment) * file.alignment
            last = min(last, os.fstat(fd).st_size // file.alignment * file.alignment)
            if last > offset:
                self._buffer = pool.take(last - first)
                assert self._buffer is not None, "there is always room in the pool"
                self._direct = engine.read(file, first, self._buffer[: last - first])
                self._count = min(size, last - offset)

    def finish(self, into: torch.Tensor) -> int:
        """Fill a tensor of as many bytes; return how many there were: fewer where the file ends. Raises `OSError`."""
        if self._direct is not None and self._buffer is not None:
            try:
                self._direct.wait()
                into.numpy()[: self._count] = self._buffer.numpy()[self._skip : self._skip + self._count]  # by this thread alone
            except OSError as error:
                if error.errno != errno.EIO or os.fstat(self._fd).st_size >= self._offset + self._count:
                    raise
                self._count = 0  # the file has become shorter: the page cache says by how much
            self._pool.give_back(self._buffer)
            self._buffer = self._direct = None
        rest = into[self._count :]
        return self._count + (read_at(self._fd, rest, self._offset + self._count, keep=self._keeps) if rest.numel() else 0)


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Say whether all of a range of a file is in the page cache; of a file of somebody else's the kernel doesn't tell."""
    if os.fstat(fd).st_uid != os.geteuid() and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        return False
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset + size - start
    flags = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    try:
        with (
            mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as mapped,
            memoryview(mapped) as view,
        ):
            address = ctypes.c_void_p(address_of(view, writable=False))
            failed = _libc.mincore(address, ctypes.c_size_t(length), flags)
    except (OSError, ValueError):  # not to be mapped, or shorter than that
        return False
    return not failed and b"\0" not in bytes(flags)


def read_at(fd: int, into: torch.Tensor, offset: int, *, keep: bool = False) -> int:
    """Fill a tensor of bytes from a file; return how many there were: fewer where the file ends.

    `keep`: leave in the page cache what was read.
    """
    view, start = memoryview(into.numpy().data), offset
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            break
        view, offset = view[count:], offset + count
    if not keep:
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, start, offset - start, os.POSIX_FADV_DONTNEED)
    return offset - start
