"""Opens files of a checkpoint; FIFOs, devices, sockets and folders are refused before they can block the process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zinf_compile.errors import CheckpointError

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFLNK: "a symbolic link",
}  # fmt: skip


def open_regular(path: Path, *, links: bool = True) -> int:
    """Open a file to read, and return its descriptor; raise `CheckpointError` if it isn't a regular file.

    `links`: through symbolic links, too.
    """
    try:
        _check(path, os.stat(path, follow_symlinks=links))  # before open(), which alone may act on a device
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        fd = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot open {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        _check(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a UTF-8 file; raise `CheckpointError` if it has more than `most_bytes` or can't be decoded."""
    fd = open_regular(path)
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > most_bytes:
            raise CheckpointError(f"{path} has {size:,} bytes; accepted: {most_bytes:,} at most")
        try:
            return file.read(most_bytes).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}; accepted: a file")
