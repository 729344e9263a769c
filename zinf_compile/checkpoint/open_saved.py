"""Opens a checkpoint that `save` has written, for commands: what is none is explained in one error.

Called by `zinf inspect` and `zinf consolidate`; knows no models.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from zinf_compile.errors import CheckpointError

from .manifest import MANIFEST, saved_name, saves_in
from .regular_file import read_text
from .saved_files import SavedFiles
from .strict_json import parse_object

FORMAT, VERSION = "zinf_compile checkpoint", 1
_MOST_MANIFEST_BYTES = 1 << 30


@contextlib.contextmanager
def open_saved(folder: str | os.PathLike[str]) -> Iterator[SavedFiles]:
    """Context with the newest checkpoint of a folder, or the one that it is. Raises `CheckpointError`."""
    where = _find(Path(folder))
    _check_format(where / MANIFEST)
    try:
        files = SavedFiles(where)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{where} is damaged: its manifests are not what a save has written ({type(error).__name__}: {error}). Was one "
            "edited? Fetch the checkpoint again"
        ) from error
    try:
        yield files
    finally:
        files.close()


def _find(folder: Path) -> Path:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "doesn't exist"
        raise CheckpointError(f"{folder} {what}; accepted: a folder that zinf_compile.save has written to")
    if (folder / MANIFEST).exists():
        return folder
    if found := saves_in(folder):
        return folder / saved_name(found[-1])
    raise CheckpointError(
        f"{folder} has no checkpoint: neither {MANIFEST} nor a folder such as {saved_name(1)} is in it; accepted: a folder that "
        "zinf_compile.save has written to"
    )


def _check_format(path: Path) -> None:
    try:
        manifest = parse_object(read_text(path, _MOST_MANIFEST_BYTES))
    except (TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}") from error
    found = manifest.get("format"), manifest.get("version")
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} is of format {found[0]!r}, version {found[1]!r}; accepted: {FORMAT!r}, version {VERSION}, which "
            "zinf_compile.save writes"
        )
