"""Tensors in safetensors files: the location of each, and reads of any range of its elements."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.direct_file import File
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.file_read import FileRead, read_at

from .regular_file import open_regular
from .safetensors_header import read_header
from .safetensors_index import find_files

_MOST_OPEN = 4
"""Files for which the I/O engine keeps descriptors open."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype | str
    """The format's name for a type that no parameter can have."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""


class Reading:
    """A read of elements of a stored tensor that is in flight."""

    def __init__(self, read: FileRead, stored: Stored, name: str, offset: int) -> None:
        self._read, self._stored, self._name, self._offset = read, stored, name, offset

    def finish(self, into: torch.Tensor) -> None:
        """Wait, and fill a flat host tensor. Raises `CheckpointError` if the file ends early."""
        got = self._read.finish(into.view(torch.uint8))
        _check_length(got, into.nbytes, self._stored, self._name, self._offset)


class TensorFiles:
    """The tensors of a safetensors file, of the files that an index names, or of a folder with either; only headers are read.

    Raises `CheckpointError`, naming file and tensor, if a file is missing, not of this format, or shorter than its header says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fds: dict[Path, int] = {}
        self._opened: dict[Path, File] = {}
        self.tensors: dict[str, Stored] = {}
        self._everywhere: dict[str, Path] = {}
        """The file of each tensor, including tensors that the index doesn't name."""
        try:
            for file, wanted in find_files(self.path).items():
                self._add(file, wanted)
        except BaseException:
            self.close()
            raise

    def check(self, wanted: Mapping[str, tuple[torch.Tensor, bool]], *, ignored: Any = None) -> list[str]:
        """Return mismatches with the tensors wanted, each given with whether it is optional; `ignored` matches extra names."""
        return mismatches(self.tensors, wanted, ignored)

    def begin(self, name: str, numel: int, *, start: int, engine: Engine, pool: BufferPool) -> Reading:
        """Start reading `numel` elements of a stored tensor from element `start` on, through buffers of `pool`."""
        stored = self.tensors[name]
        assert isinstance(stored.dtype, torch.dtype), "it was found to fit"
        offset, size = stored.start + start * stored.dtype.itemsize, numel * stored.dtype.itemsize
        read = FileRead(engine, self._open(stored.path), self._fds[stored.path], offset, size, pool)
        return Reading(read, stored, name, offset)

    def read(self, name: str, into: torch.Tensor, *, start: int = 0) -> None:
        """Fill a flat host tensor with elements of a stored one from element `start` on."""
        stored = self.tensors[name]
        if not into.numel():
            return
        offset = stored.start + start * into.dtype.itemsize
        got = read_at(self._fds[stored.path], into.view(torch.uint8), offset)
        _check_length(got, into.nbytes, stored, name, offset)

    def close(self) -> None:
        """Close the files."""
        self._opened.clear()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _open(self, path: Path) -> File:
        """Return the file as the I/O engine opens it; the last few stay open."""
        file = self._opened.pop(path, None) or File(self._fds[path])
        self._opened[path] = file
        while len(self._opened) > _MOST_OPEN:
            del self._opened[next(iter(self._opened))]
        return file

    def _add(self, path: Path, wanted: set[str] | None) -> None:
        fd = self._fds[path] = open_regular(path)
        entries = read_header(path, fd)
        for name, entry in entries.items():
            if name in self._everywhere:
                raise CheckpointError(
                    f"tensor {name} is both in {self._everywhere[name]} and in {path}; accepted: each tensor in one file"
                )
            self._everywhere[name] = path
            if wanted is None or name in wanted:
                self.tensors[name] = Stored(path, entry.dtype, entry.shape, entry.begin)
        absent = sorted(wanted - entries.keys()) if wanted is not None else []
        if absent:
            listed = "; ".join(f"{name} is missing, which the index says is in it" for name in absent)
            raise CheckpointError(f"{path} is damaged or was not written to its end: {listed}. Fetch it again")


class Described(Protocol):
    """A tensor in a file."""

    @property
    def dtype(self) -> torch.dtype | str:
        """Its type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


def mismatches(
    stored_tensors: Mapping[str, Described], wanted: Mapping[str, tuple[torch.Tensor, bool]], ignored: Any
) -> list[str]:
    """Return how tensors in files differ from those wanted, see `TensorFiles.check`."""
    problems = [f"missing: {name}" for name, (_, optional) in wanted.items() if not optional and name not in stored_tensors]
    problems += [
        f"unexpected: {name}" for name in stored_tensors if name not in wanted and not (ignored and ignored.search(name))
    ]
    for name, (tensor, _) in wanted.items():
        stored = stored_tensors.get(name)
        if stored is None:
            continue
        if stored.shape != tuple(tensor.shape):
            problems.append(f"shape of {name}: {list(stored.shape)} in the checkpoint, {list(tensor.shape)} in the model")
        if stored.dtype != tensor.dtype:
            problems.append(f"type of {name}: {stored.dtype} in the checkpoint, {tensor.dtype} in the model")
    return problems


def _check_length(got: int, wanted: int, stored: Stored, name: str, offset: int) -> None:
    if got < wanted:
        raise CheckpointError(
            f"{stored.path} ends within tensor {name}: {wanted:,} bytes wanted at offset {offset:,}, {got:,} are there. "
            "The file changed while it was read; the model is on meta as before"
        )
