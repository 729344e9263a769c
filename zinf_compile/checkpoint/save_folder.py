"""The folder that checkpoints are saved in: one job at a time, each checkpoint whole or absent, whenever the job is killed.

A checkpoint is written in a folder with a hidden name, synced and renamed; one that goes is renamed first, too. The job's rank 0
holds a lock on the folder until its process ends, or until `zinf_compile.reset()`: so whatever has a hidden name is a dead job's,
and the next save removes it. Called by `save` on rank 0; knows no tensors.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Collection, Iterable
from pathlib import Path

from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.system.process_wide import process_wide

from .manifest import partial_name, saved_name, saved_numbers, saves_in
from .reserved_space import RESERVED, reserved_in

_log = logging.getLogger("zinf_compile")

_PARTIAL = re.compile(r"\.save-\d{8}-[0-9a-f]{16}\.partial")
_MOST_LOCKS = 16
"""Folders that this process has locked between its saves: one more, and the lock that was used the longest ago goes."""


class _Lock:
    """The lock of this process on a folder; the kernel ends it with the process."""

    def __init__(self, folder: Path, advice: str) -> None:
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        self.close.atexit = False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CheckpointError(
                f"another process saves its checkpoints in {folder}; accepted: one job for each folder. End that job, or save to "
                f"another folder{advice}"
            ) from None
        except OSError as error:  # some network filesystems have no locks
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                self.close()
                raise


class _Locks(dict[tuple[int, int], _Lock]):
    """Locks by device and inode of their folders, the one that was used last at the end."""

    def forget_older(self) -> None:
        """Let go of what a job that saves to ever new folders would collect."""
        while len(self) > _MOST_LOCKS:
            self.pop(next(iter(self))).close()

    def clear(self) -> None:
        for lock in self.values():
            lock.close()
        super().clear()


_locks: _Locks = process_wide(_Locks())


def is_locked_here(folder: Path) -> bool:
    """Return whether this process holds the lock on an existing folder."""
    found = folder.stat()
    return (found.st_dev, found.st_ino) in _locks


def _forked() -> None:
    """Give up, in a child process, the copies of descriptors that would hold its parent's locks longer than the parent."""
    _locks.clear()


os.register_at_fork(after_in_child=_forked)


class SaveFolder:
    """One save into a folder: `begin`, write into `staging`, `commit`; `abandon` where that fails.

    `keep`: None for as many as option `checkpoint_keep` has announced for the folder, or one. `advice`: what to add to the error
    where another process saves there.
    """

    def __init__(self, folder: Path, *, keep: int | None, advice: str = "") -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep={keep!r}; accepted: the number of checkpoints to keep, 1 or more")
        space = reserved_in(folder)
        self.folder, self.keep = folder, keep or (1 if space is None else space.keep)
        self._number, self._advice = 0, advice
        self.staging = folder
        self.name = ""
        """The name of the new checkpoint, once it has begun."""

    def prepare(self) -> None:
        """Make the folder, lock it, and remove what dead jobs have left there.

        Raises `CheckpointError` where another job saves there, `OSError` with errno and path.
        """
        make_folder(self.folder)
        found = self.folder.stat()
        key = found.st_dev, found.st_ino
        lock = _locks.pop(key) if key in _locks else _Lock(self.folder, self._advice)
        _locks[key] = lock  # at the end
        _locks.forget_older()
        self.remove_partial()

    def begin(self) -> tuple[str, str]:
        """Prepare the folder, and make a new one inside it. Raises as `prepare`.

        Returns the name of the new folder, and the one that it has when it is whole.
        """
        self.prepare()
        self._number = 1 + max(saved_numbers(self.folder), default=0)
        self.staging = self.folder / partial_name(self._number, secrets.token_hex(8))
        self.staging.mkdir()
        return self.staging.name, saved_name(self._number)

    def commit(self) -> None:
        """Give the staged checkpoint its name, once everything in it is synced, and remove those that are not kept."""
        final = self.folder / saved_name(self._number)
        sync_folder(self.staging)
        self.staging.rename(final)
        self.staging = self.folder
        sync_folder(self.folder)
        try:
            self._remove_saves(saves_in(self.folder)[: -self.keep])
        except OSError as error:  # it is saved
            _log.warning("older checkpoints in %s stay until the next save: %s", self.folder, error)

    def keep_only(self, numbers: Collection[int]) -> None:
        """Prepare the folder, and remove all checkpoints but those of some numbers. Raises as `prepare`."""
        self.prepare()
        self._remove_saves([number for number in saves_in(self.folder) if number not in numbers])

    def _remove_saves(self, numbers: Iterable[int]) -> None:
        going = []
        for number in numbers:
            going.append(self.folder / partial_name(number, secrets.token_hex(8)))
            (self.folder / saved_name(number)).rename(going[-1])
        for path in going:
            _remove(path)
        if going:
            sync_folder(self.folder)

    def abandon(self) -> None:
        """Remove what is staged, unless it has its name."""
        if self.staging != self.folder:
            shutil.rmtree(self.staging, ignore_errors=True)

    def remove_partial(self) -> None:
        """Remove the hidden folders of saves that never ended, and files that were about to lose their names."""
        for entry in list(self.folder.iterdir()):
            if _PARTIAL.fullmatch(entry.name) or RESERVED.fullmatch(entry.name):
                _remove(entry)


def _remove(path: Path) -> None:
    """Remove a folder with all in it, or a file; of a link the link alone, never what it points at."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing. Raises an `OSError` that says what is accepted."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "a file has this name; accepted: a folder", os.fspath(folder)) from error
    except OSError as error:
        why = f"{os.strerror(error.errno or 0)}: the folder can't be made; accepted: one that is there, or that can be made"
        raise OSError(error.errno, why, os.fspath(folder)) from error
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported by the filesystem
            raise OSError(error.errno, os.strerror(error.errno or 0), os.fspath(folder)) from error
    finally:
        os.close(fd)
