"""Writes one safetensors file from host tensors; failures are `OSError`s that name the file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from zinf_compile.errors import UnsupportedModelError

from .safetensors_header import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CALL_BYTES = 64 << 20
"""The most that one system call writes."""


def save_file(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write contiguous host tensors to a new file, and sync it.

    Raises `OSError` with errno and path, `UnsupportedModelError` naming a tensor of a type that the format lacks.
    """
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_file(described, path, metadata, lambda name: [tensors[name].detach().reshape(-1)])


def write_file(
    described: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    values: Callable[[str], Iterable[torch.Tensor]],
) -> None:
    """Write tensors, given by name with type and shape, to a new file, and sync it.

    `values` returns the elements of one, in row-major order, as flat host tensors one after the other. Raises as `save_file`.
    """
    order = sorted(described, key=lambda name: (-described[name][0].itemsize, name))  # so that each one is aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        dtype, shape = described[name]
        if dtype not in _NAMES:
            raise UnsupportedModelError(f"{name} is {dtype}, which safetensors files don't hold; accepted: {list(_NAMES)}")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path) as fd:
        write_all(fd, memoryview(struct.pack("<Q", len(text)) + text))
        for name in order:
            for piece in values(name):
                if piece.numel():
                    write_all(fd, memoryview(piece.view(torch.uint8).numpy().data))


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], *, sync: bool = True) -> Iterator[int]:
    """Context with the descriptor of a new file, its mode 0666 less the umask; it is synced at the end, unless that comes later.

    Raises `OSError` with errno and path, `FileExistsError` if anything has that name, links included.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        if sync:
            os.fsync(fd)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview) -> None:
    """Write all bytes at the descriptor's offset."""
    while data:
        data = data[os.write(fd, data[:_CALL_BYTES]) :]
