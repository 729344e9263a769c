"""Reads every byte of a saved checkpoint and compares headers and checksums; all that is wrong is listed.

Called by `zinf inspect --verify`; holds one stretch of a tensor at a time.
"""

from __future__ import annotations

import os

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import format_of

from .parts_writer import CHECKED_BYTES
from .regular_file import open_regular
from .safetensors_header import read_header
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
    for key, tensor in files.tensors.items():
        for part in tensor.parts:
            said.setdefault(part.file, {})[key] = (tensor.dtype, part.rectangle.sizes, part.begin)
    problems = []
    for file, wanted in said.items():
        try:
            fd = open_regular(files.folder / file)
            try:
                entries = read_header(files.folder / file, fd)
            finally:
                os.close(fd)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for key in sorted(wanted.keys() | entries.keys()):
            there = (entries[key].dtype, entries[key].shape, entries[key].begin) if key in entries else "nothing"
            if there != wanted.get(key, "nothing"):
                problems.append(f"{files.folder / file} has {there} of {key}, its manifest says {wanted.get(key, 'nothing')}")
    return problems
