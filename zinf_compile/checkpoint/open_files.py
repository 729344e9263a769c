"""Recognises and opens what `load` is given: what `save` has written, a checkpoint of DeepSpeed, a file of `torch.save`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError

from . import deepspeed_files, deepspeed_universal
from .checkpoint_files import CheckpointFiles
from .converted_files import ConvertedFiles
from .foreign import ForeignCheckpoint
from .imported_files import ImportedFiles
from .intake import DType, Rename
from .saved_files import SavedFiles, find_save
from .torch_files import open_torch_file

_ZIP = b"PK\3\4"


def find_checkpoint(folder: str | os.PathLike[str]) -> str:
    """Return the name of the newest checkpoint in a folder, "." for what is one itself. Raises `CheckpointError`."""
    path = Path(folder)
    if path.is_file():
        return "."
    if path.is_dir() and (found := _deepspeed_folder(path)) is not None:
        return found.name if found != path else "."
    return find_save(path)


def open_files(
    path: Path,
    *,
    targets: Mapping[str, torch.Tensor],
    optimizers: Sequence[tuple[str, Optimizer]],
    dtype: DType | None,
    rename: Rename | None,
) -> CheckpointFiles:
    """Open the checkpoint that `path` is, for a model's tensors by name and its optimizers. Raises `CheckpointError`."""
    found = open_foreign(path)
    if found is not None:
        try:
            return ImportedFiles(found, targets, optimizers, dtype=dtype, rename=rename)
        except BaseException:
            found.close()
            raise
    files = SavedFiles(path)
    if dtype is None and rename is None:
        return files
    try:
        return ConvertedFiles(files, targets, dtype=dtype, rename=rename)
    except BaseException:
        files.close()
        raise


def open_foreign(path: Path) -> ForeignCheckpoint | None:
    """Open a checkpoint of DeepSpeed, the newest of its folder, or a file of `torch.save`; None for anything else."""
    if path.is_file():
        return _explained(open_torch_file, path)
    folder = _deepspeed_folder(path) if path.is_dir() else None
    if folder is None:
        return None
    universal = deepspeed_universal.is_universal(folder)
    return _explained(deepspeed_universal.open_universal if universal else deepspeed_files.open_deepspeed, folder)


def _explained(opening: Callable[[Path], ForeignCheckpoint], path: Path) -> ForeignCheckpoint:
    """Open a checkpoint; whatever its values are in the place of what is expected, they are an error that names it."""
    try:
        return opening(path)
    except (AttributeError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: other values are in it than are saved ({error!r})") from error


def is_foreign(path: Path) -> bool:
    """Say whether a path is a checkpoint of DeepSpeed, a folder of them, or, by its first bytes, a file of `torch.save`."""
    if not path.is_file():
        return path.is_dir() and _deepspeed_folder(path) is not None
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _deepspeed_folder(path: Path) -> Path | None:
    if deepspeed_universal.is_universal(path) or deepspeed_files.is_deepspeed(path):
        return path
    return deepspeed_files.find_tag(path) or deepspeed_files.find_tag(path, deepspeed_universal.LATEST)
