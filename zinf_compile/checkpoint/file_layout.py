"""The files of one rank's part of a checkpoint, planned before the first byte: which rectangles, where in which file.

A reader of safetensors, and PyTorch's `HuggingFaceStorageReader`, takes one rectangle for each name in a file. So the k-th
rectangle of every tensor goes to the k-th file. Called by the writers of checkpoints; reads and writes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence

import torch

from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.formats import format_of

from .rectangles import Rectangle
from .safetensors_header import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNED = 4096
"""Bytes: where the data begins, so that large transfers share no page with the header."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One rectangle of a tensor in a file."""

    key: str
    dtype: torch.dtype
    rectangle: Rectangle
    begin: int
    """Offset of its first byte in the file."""
    end: int


@dataclasses.dataclass(frozen=True)
class FileLayout:
    """One file: what comes before its data, and its parts in the order in which they lie."""

    header: bytes
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.parts[-1].end if self.parts else len(self.header)


def lay_out(tensors: Mapping[str, tuple[torch.dtype, Sequence[Rectangle]]]) -> list[FileLayout]:
    """Return the files that hold these rectangles of tensors, given by key with their type; as few as there can be.

    Raises `UnsupportedModelError` naming a tensor of a type that the format lacks.
    """
    for key, (dtype, _) in tensors.items():
        if dtype not in _NAMES:
            raise UnsupportedModelError(f"{key} is {dtype}, which safetensors files don't hold; accepted: {list(_NAMES)}")
    count = max((len(found) for _, found in tensors.values()), default=0)
    return [
        _file({key: (dtype, found[number]) for key, (dtype, found) in tensors.items() if number < len(found)})
        for number in range(count)
    ]


def _file(rectangles: Mapping[str, tuple[torch.dtype, Rectangle]]) -> FileLayout:
    order = sorted(rectangles, key=lambda key: -rectangles[key][0].itemsize)  # so that each one is aligned
    described: dict[str, object] = {"__metadata__": metadata_of({key: rectangle for key, (_, rectangle) in rectangles.items()})}
    spans, end = {}, 0
    for key in order:
        dtype, rectangle = rectangles[key]
        begin, end = end, end + format_of(dtype).bytes(rectangle.numel)
        spans[key] = begin, end
        described[key] = {"dtype": _NAMES[dtype], "shape": list(rectangle.sizes), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    header = struct.pack("<Q", len(text)) + text
    parts = [Part(key, *rectangles[key], len(header) + begin, len(header) + end) for key, (begin, end) in spans.items()]
    return FileLayout(header, tuple(parts))


def metadata_of(rectangles: Mapping[str, Rectangle]) -> dict[str, str]:
    """Return what `torch.distributed.checkpoint` reads of a file that holds parts of tensors."""
    offsets = {key: {"saved_offsets": list(rectangle.offsets)} for key, rectangle in rectangles.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":"))}
