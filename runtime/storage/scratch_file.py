"""Files without a name: the kernel frees them when the last process that holds them ends, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import struct
import sys
from collections.abc import Sequence

from zinf_compile.errors import StoreError
from zinf_compile.runtime.system.filesystem import look_up

from .engine import File

_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_NAMELESS_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS})
"""Errors of `O_TMPFILE` where the filesystem, or the kernel, doesn't know it."""

_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_NOCOW_FL = 0x80086601, 0x40086602, 0x00800000
"""Of <linux/fs.h>, 64-bit."""


class ScratchFile:
    """A file in `folder` that has no name and that this user alone may open. Direct I/O where the filesystem has it.

    Raises `StoreError` where the folder is missing or not writable.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            fd = _open_nameless(folder)
        except OSError as error:
            raise StoreError(
                error.errno, f"cannot keep states in {folder!r} ({error.strerror}); accepted: a folder you may write to", folder
            ) from error
        try:
            _write_in_place(fd)
            self.file = File(fd, write=True)
        finally:
            os.close(fd)

    def reserve(self, size: int) -> None:
        """Give the file `size` bytes of its own, so that no write within them can find the disk full.

        Raises `StoreError`, with the bytes needed and free, where they are not to be had: disk full, quota, file size limit.
        """
        check_room([self.folder], size)  # asking anyway would take the neighbours' last bytes for a moment
        if size == 0:
            return
        code = errno.EINTR
        while code == errno.EINTR:
            code = fallocate(self.file.fd, size)
        if code:
            with contextlib.suppress(OSError):
                os.ftruncate(self.file.fd, 0)  # the bytes free are those without what was reserved before it failed
            raise _no_room([self.folder], code, size, look_up(self.folder).free_bytes)

    def release(self) -> None:
        """Give back what was reserved."""
        os.ftruncate(self.file.fd, 0)

    def close(self) -> None:
        """Let go of the file: its space is free, unless another process holds it too."""
        self.file.close()


def check_room(folders: Sequence[str], size: int) -> None:
    """Raise `StoreError` where `size` bytes are more than are free in all folders together, as far as they say."""
    free = sum(dict(free_space(folders)).values())
    if size > free:
        raise _no_room(folders, errno.ENOSPC, size, free)


def free_space(folders: Sequence[str]) -> list[tuple[tuple[str, str], int]]:
    """Return for each folder its filesystem and the bytes free there."""
    filesystems = [look_up(folder) for folder in folders]  # of 0 bytes: one that counts nothing, such as a tmpfs without a limit
    return [((f.mount_point, f.source), f.free_bytes if f.total_bytes else sys.maxsize) for f in filesystems]


def _no_room(folders: Sequence[str], code: int, size: int, free: int) -> StoreError:
    means = {
        errno.ENOSPC: "the disk is full; free some space or choose another path",
        errno.EDQUOT: "the disk quota is used up; raise it or choose another path",
        errno.EFBIG: "a file may not be that large here (see `ulimit -f`, or the filesystem's own limit)",
        errno.EOPNOTSUPP: "this filesystem cannot reserve space; choose one that can, such as ext4, xfs or btrfs",
    }.get(code, os.strerror(code))
    where = ", ".join(map(repr, folders))
    return StoreError(code, f"cannot reserve space in {where}: {size:,} bytes needed, {free:,} bytes free: {means}", folders[0])


def fallocate(fd: int, size: int) -> int:
    """Ask the kernel to reserve the first `size` bytes of a file; return its errno, 0 on success.

    Not `os.posix_fallocate`: where the filesystem can't, that would write to every block instead, for hours.
    """
    return 0 if _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0 else ctypes.get_errno()


def _write_in_place(fd: int) -> None:
    """Have btrfs overwrite blocks where they lie, not copy them: each copy would need space that nobody has reserved."""
    flags = bytearray(8)
    with contextlib.suppress(OSError):  # other filesystems write in place
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("=q", struct.unpack("=q", flags)[0] | _FS_NOCOW_FL))


def _open_nameless(folder: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES or not os.path.isdir(folder):
            raise
    path = os.path.join(folder, f".zinf-{secrets.token_hex(16)}")
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.unlink(path)
    return fd
