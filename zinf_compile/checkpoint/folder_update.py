"""Atomic replacement of the files of a folder: a process killed at any moment leaves all old files or all new ones.

New files are written to a staging folder inside the target. Files that nothing refers to yet are renamed into place first, then
the index that refers to them; old files are removed once the index is durable. A save holds a lock on its staging folder while
its process lives, so that the next save removes only those of dead processes. Called by `save_safetensors`; knows no tensors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .save_folder import is_locked_here, make_folder, sync_folder

_STAGING_NAME = re.compile(r"\.model-[0-9a-f]{16}\.partial")
_LOCK_TIMEOUT_S = 60.0
"""Far longer than another process needs: it holds the lock while it renames files and syncs the folder a few times."""
_LOCK_SILENT_S = 1.0
"""Then a line in the log says what it waits for."""
_LOCK_POLL_S = 0.01


_HELD = (
    "another process has locked {folder}, as long as it writes a model there or, where it saves checkpoints there by "
    "zinf_compile.save, until it ends"
)

_log = logging.getLogger("zinf_compile")


class FolderUpdate:
    """One replacement of a folder's files: `begin`, `write` for each new file, `replace` to commit, `end` to clean up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._staging: Path | None = None
        self._lock: int | None = None
        self._uncommitted: list[Path] = []
        """Files renamed into the folder before the commit."""
        self._committed = False
        """True once readers of the folder find the new files."""

    def begin(self) -> None:
        """Make the folder if it is missing, remove staging folders of dead processes, and make one. Raises `OSError`."""
        with self._explained():
            make_folder(self.folder)
            with _locked(self.folder) as locked:
                if locked:
                    self._remove_dead_staging()
                staging = self.folder / f".model-{secrets.token_hex(8)}.partial"
                staging.mkdir()
                self._staging = staging
                self._lock = _open(staging)
                if locked:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, name: str, make: Callable[[Path], object]) -> None:
        """Call `make` with the staged path of a file, which it writes and syncs. Raises `OSError` naming the final path."""
        assert self._staging is not None, "begun"
        with self._explained(self.folder / name):
            make(self._staging / name)

    def replace(self, names: Sequence[str], *, last: str, stale: str, stale_wins: bool, old: re.Pattern[str]) -> None:
        """Rename the staged files into the folder.

        `last`: the file whose rename commits the new ones. `stale`: an entry point of the old files, removed after that; with
        `stale_wins`, readers prefer it to `last`, so its removal is the commit. `old`: pattern of all other names that are
        removed at the end. Raises `OSError`.
        """
        assert self._staging is not None, "begun"
        with self._explained(), _locked(self.folder):
            for name in names:
                if name != last:
                    self._uncommitted.append(self.folder / name)
                    os.rename(self._staging / name, self.folder / name)
            if self._uncommitted:
                sync_folder(self.folder)
            os.rename(self._staging / last, self.folder / last)
            if stale_wins and os.path.lexists(self.folder / stale):
                self._uncommitted.append(self.folder / last)
            else:
                self._commit()
            sync_folder(self.folder)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / stale)
                self._commit()
                sync_folder(self.folder)
            kept = {*names, last}
            for name in os.listdir(self.folder):
                if old.fullmatch(name) and name not in kept:
                    os.unlink(self.folder / name)

    def _commit(self) -> None:
        self._uncommitted.clear()
        self._committed = True

    def end(self) -> None:
        """Remove uncommitted files. A second call does nothing."""
        with contextlib.suppress(OSError):
            for path in reversed(self._uncommitted):
                path.unlink(missing_ok=True)
        self._uncommitted.clear()
        if self._staging is not None and self._lock is not None:
            _remove(self._staging, self._lock)
        if self._lock is not None:
            os.close(self._lock)
        self._staging = self._lock = None

    def _remove_dead_staging(self) -> None:
        for name in filter(_STAGING_NAME.fullmatch, os.listdir(self.folder)):
            with contextlib.suppress(OSError):  # locked by a live save, or owned by another user
                lock = _open(self.folder / name)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(self.folder / name, lock)
                finally:
                    os.close(lock)

    @contextlib.contextmanager
    def _explained(self, path: Path | None = None) -> Iterator[None]:
        """Context that adds the state of the save to an error of the filesystem and keeps its errno."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            state = "the new files are in place" if self._committed else "the folder is as before"
            what = f"cannot save the model: {error.strerror or os.strerror(error.errno)}; {state}"
            raise OSError(error.errno, what, os.fspath(path or error.filename or self.folder)) from error


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove(staging: Path, fd: int) -> None:
    """Remove a staging folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(fd):
            os.unlink(name, dir_fd=fd)
        os.rmdir(staging)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Context with the folder locked against other saves; yields False where the filesystem has no such locks.

    A folder that this process has locked for its checkpoints is locked already.
    """
    if is_locked_here(folder):
        yield True
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        locked = _wait_for_lock(fd, folder)
        try:
            yield locked
        finally:
            if locked:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, folder: Path) -> bool:
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            waited = time.monotonic() - began
            if waited > _LOCK_TIMEOUT_S:
                what = f"{os.strerror(errno.ETIMEDOUT)}: {_HELD.format(folder=folder)}. End that job, or save to another folder"
                raise OSError(errno.ETIMEDOUT, what, os.fspath(folder)) from error
            if waited > _LOCK_SILENT_S and not told:
                told = True
                held = _HELD.format(folder=folder)
                _log.warning("save_safetensors waits, %g s at most, for a lock: %s", _LOCK_TIMEOUT_S, held)
            time.sleep(_LOCK_POLL_S)
        except OSError:  # unsupported by some network filesystems
            return False
