"""Tensors in safetensors files: where each one lies, and any range of its bytes, without reading the rest."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError
from .file_reads import FileRead
from .places import read_at
from .runtime.aio import Engine
from .runtime.buffers import BufferPool
from .runtime.file import File

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MOST_HEADER_BYTES = 100_000_000
"""What the format allows."""
_MOST_OPEN = 4
"""Files that the I/O engine has descriptors of its own of."""
INDEX = "model.safetensors.index.json"
"""Says which of several files has which tensor."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype | str
    """The format's own name for one that PyTorch doesn't have."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""


class Reading:
    """Elements of a stored tensor that are being read."""

    def __init__(self, read: FileRead, stored: Stored, name: str, offset: int) -> None:
        self._read, self._stored, self._name, self._offset = read, stored, name, offset

    def finish(self, into: torch.Tensor) -> None:
        """Fill a flat tensor of the host. Raises `CheckpointError` where the file ends before."""
        got = self._read.finish(into.view(torch.uint8))
        _check_length(got, into.nbytes, self._stored, self._name, self._offset)


class TensorFiles:
    """The tensors of a safetensors file, of those that an index names, or of a folder with either. Not one is read yet.

    Raises `CheckpointError` where a file is missing, isn't one of this format, or is shorter than it says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fds: dict[Path, int] = {}
        self._opened: dict[Path, File] = {}
        self.tensors: dict[str, Stored] = {}
        try:
            for file, wanted in _files(self.path).items():
                self._add(file, wanted)
        except BaseException:
            self.close()
            raise

    def check(self, wanted: Mapping[str, tuple[torch.Tensor, bool]], *, ignored: Any = None) -> list[str]:
        """Return what doesn't fit the tensors wanted, each with whether it may be missing; `ignored` matches extra names."""
        problems = [f"missing: {name}" for name, (_, optional) in wanted.items() if not optional and name not in self.tensors]
        problems += [
            f"unexpected: {name}" for name in self.tensors if name not in wanted and not (ignored and ignored.search(name))
        ]
        for name, (tensor, _) in wanted.items():
            stored = self.tensors.get(name)
            if stored is None:
                continue
            if stored.shape != tuple(tensor.shape):
                problems.append(f"shape of {name}: {list(stored.shape)} in the checkpoint, {list(tensor.shape)} in the model")
            if stored.dtype != tensor.dtype:
                problems.append(f"type of {name}: {stored.dtype} in the checkpoint, {tensor.dtype} in the model")
        return problems

    def begin(self, name: str, numel: int, *, start: int, engine: Engine, pool: BufferPool) -> Reading:
        """Start to read elements of a stored tensor from number `start` on, by way of buffers of a pool that has room."""
        stored = self.tensors[name]
        assert isinstance(stored.dtype, torch.dtype), "it was found to fit"
        offset, size = stored.start + start * stored.dtype.itemsize, numel * stored.dtype.itemsize
        read = FileRead(engine, self._open(stored.path), self._fds[stored.path], offset, size, pool)
        return Reading(read, stored, name, offset)

    def read(self, name: str, into: torch.Tensor, *, start: int = 0) -> None:
        """Fill a flat tensor of the host with elements of a stored one from number `start` on."""
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
        """Return a file as the I/O engine reads it; the last few stay open."""
        file = self._opened.pop(path, None) or File(self._fds[path])
        self._opened[path] = file
        while len(self._opened) > _MOST_OPEN:
            del self._opened[next(iter(self._opened))]
        return file

    def _add(self, path: Path, wanted: set[str] | None) -> None:
        try:
            fd = self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
        size = os.fstat(fd).st_size
        header, data = _read_header(path, fd, size)
        problems: list[str] = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            except (TypeError, KeyError, ValueError):
                problems.append(f"{name} has no dtype, shape and data_offsets")
                continue
            known = _DTYPES.get(dtype, dtype)
            if data + end > size:
                problems.append(f"{name} ends at byte {data + end:,} of {size:,}")
            elif isinstance(known, torch.dtype) and end - begin != math.prod(shape) * known.itemsize:
                problems.append(f"{name}, {list(shape)} {dtype}, has {end - begin:,} bytes")
            if wanted is None or name in wanted:
                self.tensors[name] = Stored(path, known, shape, data + begin)
        if wanted is not None:
            problems += [f"{name} is missing, which the index says is in it" for name in sorted(wanted - header.keys())]
        if problems:
            raise CheckpointError(f"{path} is damaged or was not written to its end: {'; '.join(problems)}. Fetch it again")


def _check_length(got: int, wanted: int, stored: Stored, name: str, offset: int) -> None:
    if got < wanted:
        raise CheckpointError(
            f"{stored.path} ends within tensor {name}: {wanted:,} bytes wanted at offset {offset:,}, {got:,} are there. "
            "The file changed while it was read; the model is on meta as before"
        )


def _files(path: Path) -> dict[Path, set[str] | None]:
    """Return the files, and which of their tensors count (None: all)."""
    if path.is_dir():
        singles = sorted(path.glob("*.safetensors"))
        if (path / INDEX).exists():
            return _files(path / INDEX)
        if (path / "model.safetensors").exists():
            return {path / "model.safetensors": None}
        if len(singles) != 1:
            raise CheckpointError(
                f"folder {path} holds {len(singles)} files *.safetensors and no {INDEX}; accepted: a folder with an index, with "
                "a model.safetensors or with a single such file, or the path of one"
            )
        return {singles[0]: None}
    if path.suffix != ".json":
        return {path: None}
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        files: dict[Path, set[str] | None] = {path.parent / file: set() for file in weight_map.values()}
        for name, file in weight_map.items():
            files[path.parent / file].add(name)  # type: ignore[union-attr]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error!r}); accepted: JSON with a weight_map") from error
    absent = [str(file) for file in files if not file.exists()]
    if absent:
        raise CheckpointError(f"{path} names files that are missing: {', '.join(absent)}")
    return files


def _read_header(path: Path, fd: int, size: int) -> tuple[dict[str, Any], int]:
    """Return the header and where the data begins."""
    prefix = os.pread(fd, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 0 < length <= min(size - 8, _MOST_HEADER_BYTES):
        raise CheckpointError(
            f"{path} ({size:,} bytes) is no whole safetensors file: its header would have {length:,} bytes. Fetch it again"
        )
    try:
        header = json.loads(os.pread(fd, length, 8))
    except ValueError as error:
        raise CheckpointError(f"{path} is no safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is a {type(header).__name__}")
    return header, 8 + length
