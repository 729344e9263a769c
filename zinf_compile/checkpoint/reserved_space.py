"""Space on a drive that is held for checkpoints to come: files without a name, which become the files of a save.

The kernel frees them when the process ends, however it ends, so that nothing of them is ever left to clean up. Called by
`announced`, which makes a rank's reservation, and by `save`, which uses and renews it; knows no tensors.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from zinf_compile.runtime.storage.scratch_file import fallocate
from zinf_compile.runtime.system.process_wide import process_wide

from .manifest import saves_in
from .safetensors_writer import new_file

_log = logging.getLogger("zinf_compile")

RESERVED = re.compile(r"\.reserved-\d+-[0-9a-f]{16}")
"""Names, for a moment, of reserved files where the filesystem makes none without a name."""

UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of filesystems that can't allocate space before it is written."""

_MEANINGS = {
    errno.ENOSPC: "the drive is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file may not be that large here (see `ulimit -f`, or the filesystem's own limit)",
}


class ReservedFile:
    """A file in a folder without a name, of `size` bytes that are allocated. Raises `OSError` with errno and folder."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self._folder = folder
        self._can_be_named = True
        try:
            self._fd = os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS):
                raise
            self._can_be_named = False
            self._fd = _unnamed(folder)
        try:
            allocate(self._fd, folder, size)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def named(self, path: Path) -> Iterator[int]:
        """Context with the descriptor of the file, which has that name from now on; it is closed at the end, and not synced.

        Where the filesystem gives no name to such a file, its space is freed for a new one. Raises as `new_file`.
        """
        if not self._can_be_named or not self._link(path):
            self.close()
            with new_file(path, sync=False) as fd:
                yield fd
            return
        fd, self._fd = self._fd, -1
        try:
            yield fd
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error
        finally:
            os.close(fd)

    def extend(self, size: int) -> None:
        """Hold so many bytes, if these are more."""
        if size > self.size:
            allocate(self._fd, self._folder, size)
            self.size = size

    def close(self) -> None:
        """Free the space."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _link(self, path: Path) -> bool:
        try:
            os.link(f"/proc/self/fd/{self._fd}", path, src_dir_fd=self._fd, follow_symlinks=True)
        except FileExistsError:
            raise
        except OSError as error:  # a process without /proc, or a filesystem that can't
            _log.debug("a reserved file in %s can't be named (%s): its space is freed for a new one", self._folder, error)
            return False
        return True


class Slot:
    """The space of one rank's part of one checkpoint."""

    def __init__(self, folder: Path, sizes: Sequence[int], rest: int) -> None:
        self._folder = folder
        self.files: list[ReservedFile] = []
        self._rest: list[ReservedFile] = []
        try:
            self.extend(sizes)
            for size in (rest // 4, rest - rest // 4):
                self._rest.append(ReservedFile(folder, size))
        except BaseException:
            self.close()
            raise

    def extend(self, sizes: Sequence[int]) -> None:
        """Hold files of at least these sizes."""
        for number, size in enumerate(sizes):
            if number < len(self.files):
                self.files[number].extend(size)
            else:
                self.files.append(ReservedFile(self._folder, size))

    @property
    def bytes(self) -> int:
        """Bytes that it holds."""
        return sum(file.size for file in [*self.files, *self._rest])

    def free_rest(self) -> None:
        """Free a part of what is not for files of tensors: for names of files at first, then for manifests."""
        if self._rest:
            self._rest.pop(0).close()

    def lacks(self, sizes: Sequence[int]) -> int:
        """Return the bytes that files of these sizes need beside it."""
        held = [file.size for file in self.files] + [0] * len(sizes)
        return sum(max(0, size - there) for size, there in zip(sizes, held, strict=False))

    def close(self) -> None:
        """Free all that is left of it."""
        for file in [*self.files, *self._rest]:
            file.close()
        self.files, self._rest = [], []


class ReservedSpace:
    """What this rank holds in one folder: a slot for each checkpoint to come until the oldest ones go."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.supported = True
        """Whether the filesystem can hold space at all."""
        self._sizes: list[int] = []
        self._rest = 0
        self._slots: list[Slot] = []

    @property
    def wanted(self) -> int:
        """Slots for `keep` checkpoints beside the one that is written, less those that are there."""
        return max(1, self.keep + 1 - len(saves_in(self.folder)))

    @property
    def bytes(self) -> int:
        """Bytes of one slot."""
        return sum(self._sizes) + self._rest

    @property
    def lacking(self) -> int:
        """Bytes that all wanted slots take beside those that are there."""
        return self.wanted * self.bytes - sum(slot.bytes for slot in self._slots[: self.wanted])

    def grow(self, sizes: Sequence[int], rest: int = 0) -> None:
        """Let slots hold files of these sizes, too, when they are filled next."""
        more = [0] * abs(len(sizes) - len(self._sizes))
        self._sizes = [max(pair) for pair in zip([*self._sizes, *more], [*sizes, *more], strict=False)]
        self._rest = max(rest, self._rest)

    def fill(self) -> None:
        """Make all the slots that are wanted, and no more. Raises `OSError`; the slots that there are stay."""
        while len(self._slots) > self.wanted:
            self._slots.pop().close()
        try:
            for slot in self._slots:
                slot.extend(self._sizes)
            while self.supported and len(self._slots) < self.wanted:
                self._slots.append(Slot(self.folder, self._sizes, self._rest))
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.supported = False

    def renew(self) -> None:
        """Make the slots that are wanted after a save; where there is no space for them, log a warning."""
        try:
            self.fill()
        except OSError as error:
            _log.warning(
                "space for the next checkpoint could not be reserved: %s. Training goes on; free %s bytes before the next save, "
                "which fails otherwise", error, f"{self.bytes:,}",
            )  # fmt: skip

    def take(self) -> Slot | None:
        """Return a slot for a save that begins; None where there is none."""
        return self._slots.pop() if self._slots else None

    def close(self) -> None:
        """Free all slots."""
        while self._slots:
            self._slots.pop().close()


class _Spaces(dict[tuple[int, int], ReservedSpace]):
    """Reservations by device and inode of their folders."""

    def clear(self) -> None:
        for space in self.values():
            space.close()
        super().clear()


_spaces: _Spaces = process_wide(_Spaces())


def reserved_in(folder: Path) -> ReservedSpace | None:
    """Return what this rank holds in a folder; None where no space was reserved, or the folder is missing."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return _spaces.get((found.st_dev, found.st_ino))


def space_in(folder: Path, *, keep: int) -> ReservedSpace:
    """Return what this rank holds in an existing folder, made at the first call; it is for `keep` checkpoints from now on."""
    found = folder.stat()
    space = _spaces.setdefault((found.st_dev, found.st_ino), ReservedSpace(folder, keep=keep))
    space.keep = keep
    return space


def allocate(fd: int, path: Path, size: int) -> None:
    """Allocate the first `size` bytes of a file. Raises `OSError` with errno and `path`, also where the filesystem can't."""
    code = errno.EINTR
    while size and code == errno.EINTR:
        code = fallocate(fd, size)
    if size and code:
        raise OSError(code, f"{os.strerror(code)}: {_MEANINGS.get(code, 'space cannot be reserved')}", os.fspath(path))


def _unnamed(folder: Path) -> int:
    path = folder / f".reserved-{os.getpid()}-{os.urandom(8).hex()}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    path.unlink(missing_ok=True)  # by now the next save of the job may have taken it for a dead one's
    return fd


def _forked() -> None:
    """Give up, in a child process, the copies of descriptors that would hold the space longer than its parent."""
    _spaces.clear()


os.register_at_fork(after_in_child=_forked)
