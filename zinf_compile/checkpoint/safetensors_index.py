"""Finds the files of a checkpoint and, with an index, the tensors of each file."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from zinf_compile.errors import CheckpointError

from .regular_file import read_text
from .strict_json import parse_object

SINGLE = "model.safetensors"
"""A model in a single file. In a folder it takes precedence over an index, as in transformers."""
INDEX = "model.safetensors.index.json"
"""The index: maps each tensor to its file."""
_MOST_INDEX_BYTES = 100_000_000


def find_files(path: Path) -> dict[Path, set[str] | None]:
    """Return the files of a checkpoint, each with the names of its tensors (None: all of them). Raises `CheckpointError`."""
    try:
        if path.is_dir():
            return _files_of_folder(path)
        return _files_of_index(path) if path.suffix == ".json" else {path: None}
    except OSError as error:
        raise CheckpointError(f"cannot open {error.filename or path}: {error.strerror}") from error


def _files_of_folder(folder: Path) -> dict[Path, set[str] | None]:
    if (folder / SINGLE).exists():
        return {folder / SINGLE: None}
    if (folder / INDEX).exists():
        return _files_of_index(folder / INDEX)
    singles = sorted(folder.glob("*.safetensors"))
    if len(singles) != 1:
        raise CheckpointError(
            f"folder {folder} holds {len(singles)} files *.safetensors and no {INDEX}; accepted: a folder with an index, with "
            f"a {SINGLE} or with a single such file, or the path of one"
        )
    return {singles[0]: None}


def _files_of_index(path: Path) -> dict[Path, set[str] | None]:
    try:
        index = parse_object(read_text(path, _MOST_INDEX_BYTES))
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map of tensors to files")
        files: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            if problem := _name_problem(file):
                raise ValueError(f"the file of {name} is {file!r}, {problem}")
            wanted = files.setdefault(path.parent / file, set())
            assert wanted is not None, "made here"
            wanted.add(name)
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no index of safetensors files ({error}); accepted: JSON with a weight_map of tensors to names of files "
            "in this folder"
        ) from error
    absent = [str(file) for file in files if not file.exists()]
    if absent:
        raise CheckpointError(f"{path} names files that are missing: {', '.join(absent)}")
    return files


def _name_problem(file: object) -> str:
    """Return the problem with a file's name, or "". It must stay within the folder; files there may be links elsewhere."""
    if not isinstance(file, str) or not file:
        return "no name of a file"
    if "\0" in file:
        return "which contains a NUL character"
    parts = PurePosixPath(file)
    if parts.is_absolute() or ".." in parts.parts:
        return "which leads out of the folder of the index"
    return ""
