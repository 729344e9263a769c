"""Files opened for the I/O engine: direct (O_DIRECT) where the filesystem allows it, and buffered for what is not aligned."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from types import TracebackType

from zinf_compile import _csrc

_log = logging.getLogger("zinf_compile")


class Descriptor:
    """An open file descriptor, closed when nobody refers to it any more: not before the last transfer that uses it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class File:
    """A file to read from and, with `write=True`, to write to, made with mode 0600 if it does not exist.

    `path_or_fd` may be a descriptor too, also of a file without a name: the file is opened once more, and the caller keeps
    theirs. Raises `OSError`, as `open` does.

    With `direct=True` transfers bypass the page cache where the filesystem can do that; where it can't, `direct` is False and
    a line on the logger `zinf_compile` says so. A transfer of a direct file whose memory, offset or length is not a multiple
    of `alignment` goes through the page cache: correct, and slow. No two transfers in flight may then share a page.
    """

    def __init__(self, path_or_fd: str | os.PathLike[str] | int, *, direct: bool = True, write: bool = False) -> None:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        if isinstance(path_or_fd, int):
            self.path = os.readlink(f"/proc/self/fd/{path_or_fd}")
            """Its name in errors."""
            opened = os.open(f"/proc/self/fd/{path_or_fd}", flags)
        else:
            self.path = os.fspath(path_or_fd)
            opened = os.open(path_or_fd, flags | (os.O_CREAT if write else 0), 0o600)
        self.writable = write
        """Whether it may be written to."""
        self.alignment = 1
        """Bytes that memory, offset and length of a direct transfer must be multiples of; 1 if `direct` is False."""
        self._buffered: Descriptor | None = Descriptor(opened)
        self._direct: Descriptor | None = None
        self._unsynced = False
        if direct:
            self._try_direct(opened, flags)

    @property
    def direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""
        return self.alignment > 1

    @property
    def fd(self) -> int:
        """The descriptor that aligned transfers use. Raises `ValueError` once closed."""
        return (self._direct or self._open()).fd

    def sync(self) -> None:
        """Make what was written durable, size included. Raises `OSError`, and `ValueError` once closed."""
        os.fsync(self._open().fd)

    def choose(self, offset: int, address: int, size: int, *, write: bool) -> tuple[Descriptor, int]:
        """Return the descriptor for a transfer, and what it must be resumed at a multiple of."""
        buffered = self._open()
        if write and not self.writable:
            raise OSError(errno.EBADF, "the file was opened for reading only: open it with write=True", self.path)
        if self._direct is None:
            return buffered, 1
        if (offset | address | size) % self.alignment == 0:
            return self._direct, self.alignment
        if write:
            self._unsynced = True
        else:
            # The page cache may hold pages from before a direct write that met a dirty neighbour of theirs.
            if self._unsynced:
                os.fdatasync(buffered.fd)
                self._unsynced = False
            os.posix_fadvise(buffered.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return buffered, 1

    def close(self) -> None:
        """Close the file once the transfers in flight are over. Closing again does nothing."""
        self._buffered = self._direct = None

    def abandon(self) -> None:
        """In a forked child: close the file at once, though copies of transfers in flight still refer to its descriptors."""
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in (self._buffered, self._direct):
            if descriptor is not None:
                os.dup2(nowhere, descriptor.fd, inheritable=False)
        os.close(nowhere)
        self.close()

    def __enter__(self) -> File:
        """Return the file itself, to be closed at the end of the `with` block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file."""
        self.close()

    def __repr__(self) -> str:
        """Show path and kind."""
        return f"<File {self.path!r}, {f'direct at {self.alignment} bytes' if self.direct else 'buffered'}>"

    def _open(self) -> Descriptor:
        if self._buffered is None:
            raise ValueError(f"I/O on a closed file: {self.path!r}")
        return self._buffered

    def _try_direct(self, opened: int, flags: int) -> None:
        link = f"/proc/self/fd/{opened}"
        asked = _csrc.direct_io_alignment(link)
        # Whole pages, so that no direct transfer shares a page of the page cache with a buffered one.
        alignment = max(asked.memory, asked.offset, mmap.PAGESIZE)
        try:
            direct = Descriptor(os.open(link, flags | os.O_DIRECT))
            with mmap.mmap(-1, alignment) as page:
                os.preadv(direct.fd, [page], 0)
        except OSError as refusal:
            if refusal.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            _log.warning("transfers of %r go through the page cache: its filesystem refuses O_DIRECT", self.path)
            return
        self._direct, self.alignment = direct, alignment
