"""Reads every byte of a saved checkpoint and compares headers and checksums; all that is wrong is listed.

Called by `zinf inspect --verify`; holds one stretch of a tensor at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import format_of

from .file_layout import metadata_of
from .parts_writer import CHECKED_BYTES
from .rectangles import Rectangle
from .regular_file import open_regular
from .safetensors_header import read_whole_header
from .saved_files import SavedFiles


def verify(files: SavedFiles) -> tuple[int, list[str]]:
    """Return the bytes of values that were read, and the problems, one sentence each."""
    problems = _header_problems(files)
    done = 0
    for key, tensor in files.tensors.items():
        most = max(1, format_of(tensor.dtype).numel_within(CHECKED_BYTES))
        for part in tensor.parts:
            for first in range(0, part.numel, most):
                values = torch.empty(min(most, part.numel - first), dtype=tensor.dtype)
                try:
                    files.read_part(key, part, first, values)
                except CheckpointError as error:
                    problems.append(str(error))
                else:
                    done += values.nbytes
    return done, list(dict.fromkeys(problems))


def _header_problems(files: SavedFiles) -> list[str]:
    """Compare the headers of the files with what the manifests say of them."""
    said: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...], int]]] = {}
    places: dict[str, dict[str, Rectangle]] = {}
    for key, tensor in files.tensors.items():
        for part in tensor.parts:
            said.setdefault(part.file, {})[key] = (tensor.dtype, part.rectangle.sizes, part.begin)
            places.setdefault(part.file, {})[key] = part.rectangle
    problems = []
    for file, wanted in said.items():
        try:
            fd = open_regular(files.folder / file)
            try:
                entries, beside = read_whole_header(files.folder / file, fd)
            finally:
                os.close(fd)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for key in sorted(wanted.keys() | entries.keys()):
            there = (entries[key].dtype, entries[key].shape, entries[key].begin) if key in entries else "nothing"
            if there != wanted.get(key, "nothing"):
                problems.append(f"{files.folder / file} has {there} of {key}, its manifest says {wanted.get(key, 'nothing')}")
        if not _says(beside, metadata_of(places[file])):
            problems.append(
                f"{files.folder / file} says of its tensors' places in the whole, for other readers, what its manifest doesn't"
            )
    return problems


def _says(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Say whether a header has what its writer put beside the tensors, in whatever order that names them."""
    return {name: _parsed(text) for name, text in found.items()} == {name: _parsed(text) for name, text in wanted.items()}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
