"""New files of a folder that take the place of the old ones together: a process killed at any moment leaves all old or all new.

New files are written to a folder of drafts beside the old ones. Files of names that nobody refers to yet are moved in first,
then the one that refers to them, and old ones are removed once that has reached the drive. Each save holds a lock on its
drafts for as long as its process lives, so that the next save removes those of dead processes only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_DRAFTS = re.compile(r"\.model-[0-9a-f]{16}\.partial")
_PATIENCE_S = 60.0
"""For another process to put its files into place; that takes as long as a few syncs of a folder."""
_PAUSE_S = 0.01


class FolderUpdate:
    """Drafts of new files of a folder: made by `begin` and `write`, put into place by `replace`; `end` removes what is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._drafts: Path | None = None
        self._lock: int | None = None
        self._placed: list[Path] = []
        """Files that were moved in and that don't count yet."""
        self._counts = False
        """Whether the new files do."""

    def begin(self) -> None:
        """Make the folder where it is missing, remove drafts of dead processes, and make a folder of drafts. Raises `OSError`."""
        with self._explained():
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                _sync(self.folder.parent)
            with _locked(self.folder) as known:
                if known:
                    self._remove_dead_drafts()
                drafts = self.folder / f".model-{secrets.token_hex(8)}.partial"
                drafts.mkdir()
                self._drafts = drafts
                self._lock = _open(drafts)
                if known:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, name: str, make: Callable[[Path], object]) -> None:
        """Let `make` write the draft of a file, synced, at the path that it is given. Raises `OSError` naming the file to be."""
        assert self._drafts is not None, "begun"
        with self._explained(self.folder / name):
            make(self._drafts / name)

    def replace(self, names: Sequence[str], *, last: str, stale: str, stale_counts: bool, old: re.Pattern[str]) -> None:
        """Put the drafts into place.

        `last`: the one that makes the new files count. `stale`: what else would count, removed next; with `stale_counts`, as
        long as it is there the new files don't. `old`: all other files of such names are removed then. Raises `OSError`.
        """
        assert self._drafts is not None, "begun"
        with self._explained(), _locked(self.folder):
            for name in names:
                if name != last:
                    self._placed.append(self.folder / name)
                    os.rename(self._drafts / name, self.folder / name)
            if self._placed:
                _sync(self.folder)
            os.rename(self._drafts / last, self.folder / last)
            if stale_counts and os.path.lexists(self.folder / stale):
                self._placed.append(self.folder / last)
            else:
                self._count()
            _sync(self.folder)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / stale)
                self._count()
                _sync(self.folder)
            kept = {*names, last}
            for name in os.listdir(self.folder):
                if old.fullmatch(name) and name not in kept:
                    os.unlink(self.folder / name)

    def _count(self) -> None:
        self._placed.clear()
        self._counts = True

    def end(self) -> None:
        """Remove what has not become part of the folder. Ending again does nothing."""
        with contextlib.suppress(OSError):
            for path in reversed(self._placed):
                path.unlink(missing_ok=True)
        self._placed.clear()
        if self._drafts is not None and self._lock is not None:
            _remove(self._drafts, self._lock)
        if self._lock is not None:
            os.close(self._lock)
        self._drafts = self._lock = None

    def _remove_dead_drafts(self) -> None:
        for name in filter(_DRAFTS.fullmatch, os.listdir(self.folder)):
            with contextlib.suppress(OSError):  # in use, or somebody else's
                lock = _open(self.folder / name)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(self.folder / name, lock)
                finally:
                    os.close(lock)

    @contextlib.contextmanager
    def _explained(self, path: Path | None = None) -> Iterator[None]:
        """Let an error of the filesystem say what it was about, keeping its errno."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            state = "the new files count already" if self._counts else "the folder is as before"
            what = f"cannot save the model: {os.strerror(error.errno)}; {state}"
            raise OSError(error.errno, what, os.fspath(path or error.filename or self.folder)) from error


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove(drafts: Path, fd: int) -> None:
    """Remove a folder of drafts."""
    with contextlib.suppress(OSError):
        for name in os.listdir(fd):
            os.unlink(name, dir_fd=fd)
        os.rmdir(drafts)


def _sync(folder: Path) -> None:
    """Have the names of a folder reach the drive."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a filesystem without that
            raise OSError(error.errno, os.strerror(error.errno or 0), os.fspath(folder)) from error
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Context in which no other save changes the folder's names; says whether the filesystem has such locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        known = _wait_for_lock(fd, folder)
        try:
            yield known
        finally:
            if known:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, folder: Path) -> bool:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            if time.monotonic() > until:
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), os.fspath(folder)) from error
            time.sleep(_PAUSE_S)
        except OSError:  # a network filesystem may have none
            return False
