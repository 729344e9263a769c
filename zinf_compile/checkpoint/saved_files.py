"""The tensors of a saved checkpoint: reads of any range or rectangle of their elements, checked.

Called by `load`; knows no models.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.storage.engine import crc32c

from .checkpoint_files import CheckpointFiles, LaterReading, Reading
from .manifest import MANIFEST, matches_own_checksum, rank_manifest, saved_name, saves_in
from .parts_writer import CHECKED_BYTES
from .rectangles import Rectangle, cut_rectangles
from .regular_file import open_regular
from .saved_tensors import Manifest, Saved, SavedPart, add_parts, check_parts, parse_manifest
from .stretches import Stretch, Stretches
from .strict_json import parse_object


class SavedFiles(CheckpointFiles):
    """The tensors and settings of the newest checkpoint in a folder, or of the one that the folder is.

    Raises `CheckpointError` where there is none, where a manifest says what no save writes, where parts of a tensor or a file are
    missing, and where a file is a link. Any thread may read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder) / find_save(folder)
        self._stretches = Stretches(self.folder)
        text = _read(self.folder / MANIFEST)
        manifest = read_manifest(self.folder / MANIFEST, text)
        self.has_own_checksum = matches_own_checksum(text) is not None
        """Whether the manifest was compared with a checksum of itself, which earlier versions haven't written."""
        self.checksum = crc32c(text)
        """Of the manifest, and so of all."""
        self.settings = manifest.settings
        self.tensors = manifest.tensors
        self.ranks = len(manifest.ranks)
        for rank, checksum in enumerate(manifest.ranks):
            path = self.folder / rank_manifest(rank)
            text = _read(path)
            if crc32c(text) != checksum:
                raise CheckpointError(f"{path} is not the file that was saved: its checksum differs. Fetch it again")
            for file, size in add_parts(path, _parsed(path, text), self.tensors).items():
                _check_file(self.folder / file, size)
        check_parts(self.folder / MANIFEST, self.tensors)

    @property
    def read_bytes(self) -> int:
        """Bytes read of the tensors' files."""
        return self._stretches.read_bytes

    def begin(self, key: str, start: int, numel: int) -> Reading:
        """See `CheckpointFiles.begin`."""
        tensor, done, found = self.tensors[key], 0, list[_FromStretch]()
        if not tensor.in_runs:
            return LaterReading(partial(self._read_by_rectangles, key, start))
        number = bisect.bisect_right(tensor.parts, start, key=lambda part: part.first) - 1
        while done < numel:
            part = tensor.parts[number]
            first = start + done - part.first
            count = min(numel - done, part.numel - first)
            found += self._begin(key, part, first, count, at=done)
            done, number = done + count, number + 1
        return _StretchReading(found)

    def read_rectangle(self, key: str, wanted: Rectangle) -> torch.Tensor:
        """See `CheckpointFiles.read_rectangle`."""
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
            self.read_part(key, part, first, values)
            window = tuple(slice(o - w, o - w + s) for o, w, s in zip(common.offsets, wanted.offsets, common.sizes, strict=True))
            found[window] = values.as_strided(common.sizes, _strides(part.rectangle.sizes))
        return found

    def check(self, key: str) -> None:
        """See `CheckpointFiles.check`."""
        tensor = self.tensors[key]
        size = format_of(tensor.dtype).numel_within(CHECKED_BYTES)
        for part in tensor.parts:
            for start in range(0, part.numel, size):
                self.read_part(key, part, start, torch.empty(min(size, part.numel - start), dtype=tensor.dtype))

    def read_part(self, key: str, part: SavedPart, first: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor of the stored type with elements of one part, from its element `first` on."""
        _StretchReading(self._begin(key, part, first, into.numel(), at=0)).finish(into)

    def close(self) -> None:
        """See `CheckpointFiles.close`."""
        self._stretches.close()

    def _read_by_rectangles(self, key: str, start: int, into: torch.Tensor) -> None:
        done = 0
        for rectangle in cut_rectangles(self.tensors[key].shape, start, start + into.numel()):
            into[done : done + rectangle.numel] = self.read_rectangle(key, rectangle).reshape(-1)
            done += rectangle.numel

    def _begin(self, key: str, part: SavedPart, first: int, numel: int, *, at: int) -> Iterator[_FromStretch]:
        """Start to read elements of a part, which come at the element `at` of all that is read."""
        size = format_of(self.tensors[key].dtype).bytes(1)
        begin, end = first * size, (first + numel) * size
        for number in range(begin // CHECKED_BYTES, -(-end // CHECKED_BYTES)):
            low, high = number * CHECKED_BYTES, min((number + 1) * CHECKED_BYTES, part.numel * size)
            stretch = self._stretches.begin(key, part, number, high - low, whole=begin <= low and high <= end)
            yield _FromStretch(stretch, max(begin - low, 0), min(end, high) - low, at * size + max(low - begin, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class _FromStretch:
    """The bytes [low, high) of a stretch, and where they go."""

    stretch: Stretch
    low: int
    high: int
    place: int


class _StretchReading:
    """Elements that come from some stretches."""

    def __init__(self, wanted: Iterable[_FromStretch]) -> None:
        self._wanted = collections.deque(wanted)

    def finish(self, into: torch.Tensor) -> None:
        """See `Reading.finish`."""
        data = into.view(torch.uint8)
        while self._wanted:
            each = self._wanted.popleft()
            each.stretch.copy(each.low, each.high, data[each.place : each.place + each.high - each.low])


def read_manifest(path: Path, text: bytes) -> Manifest:
    """Return what the text of a manifest says, which is or will be in `path`.

    Raises `CheckpointError` for anything else, and where it has a checksum of itself that differs.
    """
    differs = CheckpointError(
        f"{path} is not the file that was saved: its checksum differs. Load an older checkpoint, or fetch it again"
    )
    matches = matches_own_checksum(text)
    if matches is False:
        raise differs
    content = _parsed(path, text)
    if matches is None and "crc32c" in content:  # not where `save` writes it
        raise differs
    return parse_manifest(path, content)


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


__all__ = ["Saved", "SavedFiles", "SavedPart", "find_save", "read_manifest"]
