"""States on drives beside a framework's checkpoint file: each rank's own, in a folder; the file names the save that is its own.

Note: A file and its states
    The states are saved beside those that the file on the drive names. The new file, which names the new ones, takes its place at
    once, and then the old states go. A process that is killed at any moment leaves a file with the very states that it was
    written with. Those that no file names are removed by the next save, and never loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.checkpoint.background import wait_for_save
from zinf_compile.checkpoint.load import load
from zinf_compile.checkpoint.manifest import MANIFEST, saved_name, saves_in
from zinf_compile.checkpoint.save import save
from zinf_compile.checkpoint.save_folder import SaveFolder, sync_folder
from zinf_compile.checkpoint.torch_archive import TorchArchive
from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.storage.engine import crc32c

_log = logging.getLogger("zinf_compile")

KEY = "zinf_compile states"
"""Of what a file says of its states, in the dict that it is."""


@dataclasses.dataclass(frozen=True)
class NamedStates:
    """What a file says of its states."""

    number: int
    """Of the save in the folder beside."""
    crc32c: int
    """The checksum of its manifest, by which another save of that number isn't taken for it."""

    @classmethod
    def of(cls, value: Any) -> NamedStates | None:
        """Read the dict that a file is; None where it names no states."""
        found = value.get(KEY) if isinstance(value, Mapping) else None
        number, checksum = (found.get("save"), found.get("crc32c")) if isinstance(found, Mapping) else (None, None)
        return cls(number, checksum) if isinstance(number, int) and isinstance(checksum, int) else None

    def as_plain(self) -> dict[str, Any]:
        """Return the entry of a file."""
        return {KEY: {"save": self.number, "crc32c": self.crc32c}}


def named_by(file: Path) -> NamedStates | None:
    """Return what a file of `torch.save` says of its states; None where it names none, or isn't there.

    Nothing that was pickled is executed, and no tensor read. Raises `CheckpointError` for anything but such a file.
    """
    if not file.exists():
        return None
    with contextlib.closing(TorchArchive(file)) as archive:
        return NamedStates.of(archive.value)


def save_beside(
    file: Path,
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    ranks: Ranks | None,
    *,
    pending: Collection[int] = (),
) -> NamedStates | None:
    """Save states in `folder`, beside those that `file` names; return, on rank 0, what the new file has to name. Collective.

    `pending`: numbers of saves that the file is about to name, where it is written in the background.
    """
    wait_for_save()
    first, kept = ranks is None or ranks.rank == 0, 0
    with failing_together(ranks, f"saving states beside {file}"):
        if first:
            keeping = _belonging(file, folder, pending)
            SaveFolder(folder, keep=None).keep_only(keeping)
            kept = len(keeping)
    kept = kept if ranks is None else ranks.share(kept, what="keeping states")
    saved = save(folder, model, optimizer, keep=kept + 1, wait=True)
    found: list[NamedStates] = []
    with failing_together(ranks, f"saving states beside {file}"):
        if first:
            found.append(NamedStates(max(saves_in(folder)), crc32c((saved / MANIFEST).read_bytes())))
    return found[0] if found else None


def remove_others(file: Path, folder: Path, new: NamedStates | None) -> None:
    """Remove states that `file` doesn't name, once it names the new ones, or none. On rank 0, after it was written.

    A file that still names others is written in the background, and one that can't be read is in another format: all stay.
    """
    try:
        if not folder.is_dir() or named_by(file) != new:
            return
        if file.exists():
            sync_file(file)
            sync_folder(file.parent)
        SaveFolder(folder, keep=None).keep_only([] if new is None else [new.number])
        if new is None:
            folder.rmdir()
    except (OSError, CheckpointError) as error:  # the file is whole
        _log.warning("states that belong to no file may stay in %s until the next save: %s", folder, error)


def load_beside(
    file: Path,
    folder: Path,
    named: NamedStates,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    ranks: Ranks | None,
) -> None:
    """Load the states that a file names, and the model's values with them. A collective operation.

    Raises `CheckpointError` on all ranks where they are not there; nothing is changed then.
    """
    states = folder / saved_name(named.number)
    with failing_together(ranks, f"finding the states of {file}"):
        if ranks is None or ranks.rank == 0:
            _check(file, states, named)
    load(states, model, optimizer)


def write_file(file: Path, value: Any) -> None:
    """Replace a file by what `torch.save` makes of a value: a process that is killed leaves all of the old one or of the new."""
    draft = file.with_name(f".{file.name}.partial")
    draft.unlink(missing_ok=True)
    torch.save(value, draft)
    sync_file(draft)
    draft.rename(file)
    sync_folder(file.parent)


def sync_file(file: Path) -> None:
    """Make a file's bytes durable."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def failing_together(ranks: Ranks | None, what: str) -> contextlib.AbstractContextManager[None]:
    """Context whose errors are raised on all ranks, where there are several."""
    return contextlib.nullcontext() if ranks is None else ranks.fail_together(what)


def _belonging(file: Path, folder: Path, pending: Collection[int]) -> set[int]:
    """Return the numbers of the saves that a file names, or is about to."""
    try:
        named = named_by(file)
    except CheckpointError:  # in another format: it may be the newest's
        return set(saves_in(folder)[-1:]) | set(pending)
    since = 0 if named is None else named.number
    return {number for number in saves_in(folder) if number == since or (number in pending and number > since)}


def _check(file: Path, states: Path, named: NamedStates) -> None:
    """Raise `CheckpointError` unless the states are there that a file was written with."""
    manifest = states / MANIFEST
    try:
        same = crc32c(manifest.read_bytes()) == named.crc32c
        wrong = "other states than that file was written with are in" if not same else ""
    except OSError as error:
        wrong = f"{error.strerror or error}: no states are in"
    if wrong:
        raise CheckpointError(
            f"{wrong} {states}, which {file} names as its own. Fetch that folder again, or go back to another checkpoint: a file "
            "and the folder beside it are moved and copied together"
        )
