"""The tensors of a saved checkpoint: where each of their elements lies, and reads of any range of them, checked.

Called by `load`; knows no models.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.storage.engine import crc32c

from .manifest import MANIFEST, rank_manifest, saved_name, saves_in
from .parts_writer import CHECKED_BYTES
from .rectangles import Rectangle
from .regular_file import open_regular
from .strict_json import parse_object


@dataclasses.dataclass(frozen=True, slots=True)
class SavedPart:
    """A rectangle in a file."""

    file: str
    rectangle: Rectangle
    first: int
    """Number of its first element in the tensor, in row-major order."""
    numel: int
    begin: int
    """Offset of that in the file."""
    checksums: tuple[int, ...]
    """CRC32C of each stretch of `CHECKED_BYTES`."""


@dataclasses.dataclass
class Saved:
    """A tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[SavedPart] = dataclasses.field(default_factory=list)
    in_runs: bool = True
    """The elements of each part follow each other in the tensor, too."""


class SavedFiles:
    """The tensors and settings of the newest checkpoint in a folder, or of the one that the folder is.

    Raises `CheckpointError` where there is none, where it is damaged, or where parts of a tensor are missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = _find(Path(folder))
        manifest = _read(self.folder / MANIFEST)
        self.manifest = manifest
        self.settings: dict[str, Any] = manifest["settings"]
        self.tensors = {
            key: Saved(tuple(described["shape"]), getattr(torch, described["dtype"]))
            for key, described in manifest["tensors"].items()
        }
        self._fds: dict[str, int] = {}
        for rank, checksum in enumerate(manifest["ranks"]):
            path = self.folder / rank_manifest(rank)
            for file, parts in _read(path, checksum).items():
                for key, part in parts.items():
                    self.tensors[key].parts.append(_part(file, part, self.tensors[key]))
        for key, tensor in self.tensors.items():
            tensor.parts.sort(key=lambda part: part.first)
            tensor.in_runs = all(_is_run(part.rectangle, tensor.shape) for part in tensor.parts)
            ends = list(itertools.accumulate((part.numel for part in tensor.parts), initial=0))
            gaps = tensor.in_runs and any(part.first != end for part, end in zip(tensor.parts, ends, strict=False))
            if gaps or ends[-1] != math.prod(tensor.shape):
                raise CheckpointError(
                    f"{self.folder} is damaged: the parts of {key} don't make up the {math.prod(tensor.shape)} elements of "
                    f"{list(tensor.shape)}; {ends[-1]} are there"
                )

    def read(self, key: str, start: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor of the stored type with elements from number `start` on, of a tensor that is `in_runs`."""
        tensor, done = self.tensors[key], 0
        number = bisect.bisect_right(tensor.parts, start, key=lambda part: part.first) - 1
        while done < into.numel():
            part = tensor.parts[number]
            first = start + done - part.first
            count = min(into.numel() - done, part.numel - first)
            self._read(key, part, first, into[done : done + count])
            done, number = done + count, number + 1

    def whole(self, key: str) -> torch.Tensor:
        """Return a whole tensor."""
        tensor = self.tensors[key]
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for part in tensor.parts:
            values, r = torch.empty(part.numel, dtype=tensor.dtype), part.rectangle
            self._read(key, part, 0, values)
            window = tuple(slice(o, o + size) for o, size in zip(r.offsets, r.sizes, strict=True))
            whole[window] = values.view(r.sizes)
        return whole

    def read_part(self, key: str, part: SavedPart, first: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor of the stored type with elements of one part, from its element `first` on."""
        self._read(key, part, first, into)

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _read(self, key: str, part: SavedPart, first: int, into: torch.Tensor) -> None:
        size = into.element_size()
        begin, end = first * size, (first + into.numel()) * size
        data = into.view(torch.uint8)
        for number in range(begin // CHECKED_BYTES, -(-end // CHECKED_BYTES)):
            low, high = number * CHECKED_BYTES, min((number + 1) * CHECKED_BYTES, part.numel * size)
            inside = begin <= low and high <= end
            buffer = data[low - begin : high - begin] if inside else torch.empty(high - low, dtype=torch.uint8)
            self._fill(part.file, part.begin + low, buffer)
            if crc32c(buffer) != part.checksums[number]:
                raise CheckpointError(
                    f"{self.folder / part.file} is damaged: the checksum of {key} differs in its bytes {low:,} to {high:,}. "
                    "Load an older checkpoint, or fetch this one again"
                )
            if not inside:
                wanted = buffer[max(begin, low) - low : min(end, high) - low]
                data[max(begin, low) - begin : min(end, high) - begin].copy_(wanted)

    def _fill(self, file: str, offset: int, buffer: torch.Tensor) -> None:
        if file not in self._fds:
            self._fds[file] = open_regular(self.folder / file)
        view = memoryview(buffer.numpy().data)
        while view:
            count = os.preadv(self._fds[file], [view], offset)
            if not count:
                raise CheckpointError(
                    f"{self.folder / file} ends at byte {offset:,}, before what its manifest says: fetch it again"
                )
            view, offset = view[count:], offset + count


def _find(folder: Path) -> Path:
    if (folder / MANIFEST).exists():
        return folder
    found = saves_in(folder)
    if not found:
        raise CheckpointError(f"{folder} has no checkpoint: neither {MANIFEST} nor a folder {saved_name(1)}; save() makes them")
    return folder / saved_name(found[-1])


def _read(path: Path, checksum: int | None = None) -> dict[str, Any]:
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        text = file.read()
    if checksum is not None and crc32c(text) != checksum:
        raise CheckpointError(f"{path} is not the file that was saved: its checksum differs")
    try:
        return parse_object(text.decode())
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}") from error


def _part(file: str, described: dict[str, Any], tensor: Saved) -> SavedPart:
    rectangle, first = Rectangle(tuple(described["offsets"]), tuple(described["sizes"])), 0
    for offset, size in zip(rectangle.offsets, tensor.shape, strict=True):
        first = first * size + offset
    return SavedPart(file, rectangle, first, rectangle.numel, described["begin"], tuple(described["crc32c"]))


def _is_run(rectangle: Rectangle, shape: Sequence[int]) -> bool:
    """Return whether the elements of a rectangle follow each other in row-major order: behind its first long side it is whole."""
    sides = list(zip(rectangle.sizes, shape, strict=True))
    first = next((dim for dim, (size, _) in enumerate(sides) if size > 1), len(sides))
    return all(size == whole for size, whole in sides[first + 1 :])
