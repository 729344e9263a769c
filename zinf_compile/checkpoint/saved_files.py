"""The tensors of a saved checkpoint: reads of any range or rectangle of their elements, checked.

Called by `load`; knows no models.
"""

from __future__ import annotations

import bisect
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.storage.engine import crc32c

from .manifest import MANIFEST, rank_manifest, saved_name, saves_in
from .parts_writer import CHECKED_BYTES
from .rectangles import Rectangle, cut_rectangles
from .regular_file import open_regular
from .saved_tensors import Saved, SavedPart, add_parts, check_parts, parse_manifest
from .strict_json import parse_object

_MOST_OPEN = 64
"""Files that are open at once."""


class SavedFiles:
    """The tensors and settings of the newest checkpoint in a folder, or of the one that the folder is.

    Raises `CheckpointError` where there is none, where a manifest says what no save writes, where parts of a tensor or a file are
    missing, and where a file is a link. `read_bytes` counts what was read of the tensors' files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder) / find_save(folder)
        self.read_bytes = 0
        self._lock = threading.Lock()
        """Held while something is read: several threads may read."""
        self._fds: dict[str, int] = {}
        self._block: tuple[SavedPart, int, torch.Tensor] | None = None
        """The last stretch of which not all was wanted, by part and number: the next read often wants the rest."""
        text = _read(self.folder / MANIFEST)
        manifest = parse_manifest(self.folder / MANIFEST, _parsed(self.folder / MANIFEST, text))
        self.checksum = crc32c(text)
        """Of the manifest, and so of all."""
        self.settings: dict[str, Any] = manifest.settings
        self.tensors = manifest.tensors
        self.ranks = len(manifest.ranks)
        """That have written it."""
        for rank, checksum in enumerate(manifest.ranks):
            path = self.folder / rank_manifest(rank)
            text = _read(path)
            if crc32c(text) != checksum:
                raise CheckpointError(f"{path} is not the file that was saved: its checksum differs. Fetch it again")
            for file, size in add_parts(path, _parsed(path, text), self.tensors).items():
                _check_file(self.folder / file, size)
        check_parts(self.folder / MANIFEST, self.tensors)

    def read(self, key: str, start: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor of the stored type with elements from number `start` on, in row-major order."""
        tensor, done = self.tensors[key], 0
        if not tensor.in_runs:
            for rectangle in cut_rectangles(tensor.shape, start, start + into.numel()):
                into[done : done + rectangle.numel] = self.read_rectangle(key, rectangle).reshape(-1)
                done += rectangle.numel
            return
        number = bisect.bisect_right(tensor.parts, start, key=lambda part: part.first) - 1
        while done < into.numel():
            part = tensor.parts[number]
            first = start + done - part.first
            count = min(into.numel() - done, part.numel - first)
            with self._lock:
                self._read(key, part, first, into[done : done + count])
            done, number = done + count, number + 1

    def read_rectangle(self, key: str, wanted: Rectangle) -> torch.Tensor:
        """Return a rectangle of a tensor, of that shape."""
        tensor = self.tensors[key]
        found = torch.empty(wanted.sizes, dtype=tensor.dtype)
        for part in tensor.parts:
            common = _common(part.rectangle, wanted)
            if common is None:
                continue
            inside = [o - p for o, p in zip(common.offsets, part.rectangle.offsets, strict=True)]
            last = [o + size - 1 for o, size in zip(inside, common.sizes, strict=True)]
            first = _number(inside, part.rectangle.sizes)
            values = torch.empty(_number(last, part.rectangle.sizes) + 1 - first, dtype=tensor.dtype)
            with self._lock:
                self._read(key, part, first, values)
            window = tuple(slice(o - w, o - w + s) for o, w, s in zip(common.offsets, wanted.offsets, common.sizes, strict=True))
            found[window] = values.as_strided(common.sizes, _strides(part.rectangle.sizes))
        return found

    def whole(self, key: str) -> torch.Tensor:
        """Return a whole tensor."""
        tensor = self.tensors[key]
        return self.read_rectangle(key, Rectangle((0,) * len(tensor.shape), tensor.shape))

    def check(self, key: str) -> None:
        """Read a tensor and compare its checksums, piece by piece. Raises `CheckpointError` where one differs."""
        tensor = self.tensors[key]
        size = format_of(tensor.dtype).numel_within(CHECKED_BYTES)
        for part in tensor.parts:
            for start in range(0, part.numel, size):
                with self._lock:
                    self._read(key, part, start, torch.empty(min(size, part.numel - start), dtype=tensor.dtype))

    def read_part(self, key: str, part: SavedPart, first: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor of the stored type with elements of one part, from its element `first` on."""
        with self._lock:
            self._read(key, part, first, into)

    def close(self) -> None:
        """Close the files."""
        self._block = None
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _read(self, key: str, part: SavedPart, first: int, into: torch.Tensor) -> None:
        size = format_of(into.dtype).bytes(1)
        begin, end = first * size, (first + into.numel()) * size
        data = into.view(torch.uint8)
        for number in range(begin // CHECKED_BYTES, -(-end // CHECKED_BYTES)):
            low, high = number * CHECKED_BYTES, min((number + 1) * CHECKED_BYTES, part.numel * size)
            if begin <= low and high <= end:
                self._read_checked(key, part, number, data[low - begin : high - begin])
                continue
            if self._block is None or self._block[0] is not part or self._block[1] != number:
                block = torch.empty(high - low, dtype=torch.uint8)
                self._read_checked(key, part, number, block)
                self._block = part, number, block
            wanted = self._block[2][max(begin, low) - low : min(end, high) - low]
            data[max(begin, low) - begin : min(end, high) - begin].copy_(wanted)

    def _read_checked(self, key: str, part: SavedPart, number: int, buffer: torch.Tensor) -> None:
        """Read one stretch that has a checksum."""
        low = number * CHECKED_BYTES
        self._fill(part.file, part.begin + low, buffer)
        if crc32c(buffer) != part.checksums[number]:
            raise CheckpointError(
                f"{self.folder / part.file} is damaged: the checksum of {key} differs in its bytes {low:,} to "
                f"{low + buffer.numel():,}. Load an older checkpoint, or fetch this one again"
            )

    def _fill(self, file: str, offset: int, buffer: torch.Tensor) -> None:
        fd = self._fds.pop(file, None)
        self._fds[file] = open_regular(self.folder / file, links=False) if fd is None else fd
        if len(self._fds) > _MOST_OPEN:
            os.close(self._fds.pop(next(iter(self._fds))))
        view = memoryview(buffer.numpy().data)
        while view:
            count = os.preadv(self._fds[file], [view], offset)
            if not count:
                raise CheckpointError(
                    f"{self.folder / file} ends at byte {offset:,}, before what its manifest says: fetch it again"
                )
            self.read_bytes += count
            view, offset = view[count:], offset + count


def find_save(folder: str | os.PathLike[str]) -> str:
    """Return the name of the newest whole checkpoint in a folder, "." for a folder that is one. Raises `CheckpointError`."""
    where = Path(folder)
    if (where / MANIFEST).exists():
        return "."
    try:
        found = saves_in(where)
        partial = [name for name in os.listdir(where) if name.endswith(".partial")]
    except FileNotFoundError:
        raise CheckpointError(f"{where} does not exist; accepted: a folder in which save() has saved") from None
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read as a folder: {error.strerror}") from error
    if found:
        return saved_name(found[-1])
    rest = f". A save was begun and has not ended: {', '.join(sorted(partial))}" if partial else ""
    raise CheckpointError(f"{where} has no checkpoint: neither {MANIFEST} nor a folder such as {saved_name(1)}{rest}")


def _read(path: Path) -> bytes:
    with os.fdopen(open_regular(path, links=False), "rb") as file:
        return file.read()


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        return parse_object(text.decode())
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}") from error


def _check_file(path: Path, size: int) -> None:
    """Raise `CheckpointError` unless a file is there, no link, and has so many bytes."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise CheckpointError(f"{path} of the checkpoint cannot be read: {error.strerror}. Fetch it again") from error
    if not stat.S_ISREG(found.st_mode):
        os.close(open_regular(path, links=False))  # says what it is
    if found.st_size < size:
        raise CheckpointError(f"{path} has {found.st_size:,} bytes, its manifest says {size:,}: it was cut off. Fetch it again")


def _common(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """Return what two rectangles share; None where that has no elements."""
    sides = list(zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
    offsets = tuple(max(a, b) for a, _, b, _ in sides)
    sizes = tuple(min(a + m, b + n) - o for (a, m, b, n), o in zip(sides, offsets, strict=True))
    return Rectangle(offsets, sizes) if all(size > 0 for size in sizes) else None


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(_strides_from_the_last(sizes))[::-1]


def _strides_from_the_last(sizes: Sequence[int]) -> Iterator[int]:
    stride = 1
    for size in reversed(sizes):
        yield stride
        stride *= size


def _number(place: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number, in row-major order, of an element of a rectangle."""
    return sum(p * stride for p, stride in zip(place, _strides(sizes), strict=True))


__all__ = ["Saved", "SavedFiles", "SavedPart", "find_save"]
