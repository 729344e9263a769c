"""The tensors that a checkpoint's manifests describe, with the parts of each: all that no save writes is refused here.

Called by `saved_files`; reads no files.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.compute_shape import LEAST_TILE
from zinf_compile.ir.formats import format_of

from .parts_writer import CHECKED_BYTES
from .rectangles import Rectangle
from .safetensors_header import DTYPES

VERSION = 1
_FORMAT = "zinf_compile checkpoint"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
_MOST_BYTES = 1 << 62


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

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What the manifest of a whole checkpoint says."""

    tensors: dict[str, Saved]
    """Still without parts."""
    settings: dict[str, Any]
    ranks: list[int]
    """Checksum of the manifest of each rank."""


def parse_manifest(path: Path, content: dict[str, Any]) -> Manifest:
    """Return what a manifest of this version says. Raises `CheckpointError` for anything else."""
    if content.get("format") != _FORMAT:
        _refuse(path, f"its format is {_short(content.get('format'))}, accepted: {_FORMAT!r}")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {_short(content.get('version'))}; accepted: {VERSION}. Load it with the version of "
            "zinf_compile that saved it"
        )
    tensors, settings, ranks = content.get("tensors"), content.get("settings"), content.get("ranks")
    if not isinstance(tensors, dict) or not isinstance(ranks, list) or not isinstance(settings, dict):
        _refuse(path, "it lacks tensors, settings or ranks")
    if not ranks or not all(_is_checksum(value) for value in ranks):
        _refuse(path, f"the checksums of ranks are {_short(ranks)}")
    found = {key: _tensor(path, key, described) for key, described in tensors.items()}
    _check_settings(path, settings, found)
    return Manifest(found, settings, ranks)


def add_parts(path: Path, content: dict[str, Any], tensors: dict[str, Saved]) -> dict[str, int]:
    """Add the parts that a rank's manifest names; return the bytes that each of its files has at least."""
    ends: dict[str, int] = {}
    for file, parts in content.items():
        if not _FILE.fullmatch(file):
            _refuse(path, f"it names the file {_short(file)}, which is no name of a file in its folder")
        if not isinstance(parts, dict):
            _refuse(path, f"the parts in {file} are {_short(parts)}")
        ends[file] = 0
        for key, described in parts.items():
            if key not in tensors:
                _refuse(path, f"{file} has a part of {_short(key)}, which the checkpoint has not")
            part = _part(path, file, key, described, tensors[key])
            tensors[key].parts.append(part)
            ends[file] = max(ends[file], part.begin + format_of(tensors[key].dtype).bytes(part.numel))
    return ends


def check_parts(path: Path, tensors: dict[str, Saved]) -> None:
    """Sort the parts of each tensor; raise `CheckpointError` where they are not exactly its elements."""
    for key, tensor in tensors.items():
        tensor.parts.sort(key=lambda part: part.first)
        tensor.in_runs = all(_is_run(part.rectangle, tensor.shape) for part in tensor.parts)
        ends = list(itertools.accumulate((part.numel for part in tensor.parts), initial=0))
        if tensor.in_runs:
            wrong = any(part.first != end for part, end in zip(tensor.parts, ends, strict=False) if part.numel)
        else:
            wrong = any(_overlap(a.rectangle, b.rectangle) for a, b in itertools.combinations(tensor.parts, 2))
        if wrong or ends[-1] != tensor.numel:
            _refuse(
                path,
                f"the parts of {key} don't make up the {tensor.numel} elements of {list(tensor.shape)}; {ends[-1]} are there",
            )


def _tensor(path: Path, key: str, described: Any) -> Saved:
    shape, name = (described.get("shape"), described.get("dtype")) if isinstance(described, dict) else (None, None)
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        _refuse(path, f"{_short(key)} has the shape {_short(shape)}")
    if not isinstance(name, str) or name not in _DTYPES:
        _refuse(path, f"{_short(key)} is of type {_short(name)}; accepted: {', '.join(_DTYPES)}")
    block, scales = described.get("block", 1), described.get("scales")
    if block != 1 or scales is not None:
        raise CheckpointError(
            f"{path}: {_short(key)} is kept in blocks of {_short(block)} elements with scales of type {_short(scales)}; "
            "accepted: elements that are their own values. Load it with the version of zinf_compile that saved it"
        )
    found = Saved(tuple(shape), _DTYPES[name])
    if format_of(found.dtype).bytes(found.numel) > _MOST_BYTES:
        _refuse(path, f"{_short(key)} has the shape {_short(shape)}, which no memory holds")
    return found


def _part(path: Path, file: str, key: str, described: Any, tensor: Saved) -> SavedPart:
    what: dict[str, Any] = described if isinstance(described, dict) else {}
    offsets, sizes, begin, checksums = (what.get(name) for name in ("offsets", "sizes", "begin", "crc32c"))
    if not isinstance(offsets, list) or not isinstance(sizes, list) or not isinstance(checksums, list):
        _refuse(path, f"the part of {key} in {file} is {_short(described)}")
    if not all(map(_is_count, [*offsets, *sizes, begin])) or not all(map(_is_checksum, checksums)):
        _refuse(path, f"the part of {key} in {file} is {_short(described)}")
    assert isinstance(begin, int), "checked"
    fits = len(offsets) == len(sizes) == len(tensor.shape)
    if not fits or any(o + size > whole for o, size, whole in zip(offsets, sizes, tensor.shape, strict=True)):
        _refuse(path, f"the part of {key} in {file}, {sizes} at {offsets}, is not within its shape {list(tensor.shape)}")
    rectangle, first = Rectangle(tuple(offsets), tuple(sizes)), 0
    for offset, size in zip(offsets, tensor.shape, strict=True):
        first = first * size + offset
    if len(checksums) != -(-format_of(tensor.dtype).bytes(rectangle.numel) // CHECKED_BYTES):
        _refuse(path, f"the part of {key} in {file} has {len(checksums)} checksums")
    return SavedPart(file, rectangle, first, rectangle.numel, begin, tuple(checksums))


def _check_settings(path: Path, settings: dict[str, Any], tensors: dict[str, Saved]) -> None:
    aliases, optimizers = settings.get("aliases", {}), settings.get("optimizers", {})
    if not isinstance(aliases, dict) or not isinstance(optimizers, dict):
        _refuse(path, "its aliases or optimizers are no objects")
    tiles = settings.get("tiles", [])
    for group in tiles if isinstance(tiles, list) else [tiles]:
        if not _is_group_of_tiles(group):
            _refuse(path, f"tiles of parameters are {_short(group)}")
    for alias, name in aliases.items():
        if not isinstance(name, str) or f"model.{name}" not in tensors:
            _refuse(path, f"{_short(alias)} is the same as {_short(name)}, which the checkpoint has not")
    for prefix, saved in optimizers.items():
        groups = saved.get("groups") if isinstance(saved, dict) else None
        if not isinstance(groups, list) or not isinstance(saved.get("class"), str) or not isinstance(saved.get("states"), dict):
            _refuse(path, f"{_short(prefix)} is {_short(saved)}")
        for group in groups:
            names = group.get("params") if isinstance(group, dict) else None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or "settings" not in group:
                _refuse(path, f"a group of {_short(prefix)} is {_short(group)}")


def _is_group_of_tiles(group: Any) -> bool:
    """Return whether that is what `describe_tiles` says of parameters that are cut alike."""
    if not isinstance(group, dict):
        return False
    names, sizes = group.get("parameters"), [group.get(key) for key in ("default", "tile", "piece_numel")]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not all(map(_is_count, sizes)):
        return False
    return bool(LEAST_TILE <= group["tile"] < group["default"])


def _is_run(rectangle: Rectangle, shape: Sequence[int]) -> bool:
    """Return whether the elements of a rectangle follow each other in row-major order: behind its first long side it is whole."""
    sides = list(zip(rectangle.sizes, shape, strict=True))
    first = next((dim for dim, (size, _) in enumerate(sides) if size > 1), len(sides))
    return all(size == whole for size, whole in sides[first + 1 :])


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_BYTES


def _is_checksum(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path} is damaged, or no save has written it: {what}. Load an older checkpoint, or fetch it again")
