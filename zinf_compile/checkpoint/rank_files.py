"""The files of a checkpoint that one rank writes: allocated before the first byte, filled, synced, and described beside them.

Called by `save` and its thread; sends nothing to other ranks.
"""

from __future__ import annotations

import bisect
import errno
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zinf_compile.runtime.storage.engine import Engine

from .file_layout import Part, lay_out
from .manifest import as_json, rank_manifest, write_new
from .parts_writer import CHECKED_BYTES, PartsWriter, StagingBuffers
from .rank_contents import RankContents
from .reserved_space import Slot
from .shard_parts import ShardPart

_STAGING_COUNT, _STAGING_BYTES = 4, 8 << 20

_LARGEST = (1 << 32) - 1
"""A checksum of the most digits."""

SPARE_BYTES = 1 << 20
"""For manifests, and what a filesystem needs for itself."""


class RankFiles:
    """The files of one rank: `allocate`, `write` and `put`, `finish`; `close` in any case."""

    def __init__(self, folder: Path, contents: RankContents, rank: int) -> None:
        self._folder, self._contents, self._rank = folder, contents, rank
        self._layouts = lay_out({key: (t.dtype, [part.rectangle for part in t.parts]) for key, t in contents.tensors.items()})
        self.sizes = [layout.size for layout in self._layouts]
        """Bytes of each file but the manifest."""
        self._slot: Slot | None = None
        self._names = [f"rank-{rank:05}-{number:04}.safetensors" for number in range(len(self._layouts))]
        self._engine: Engine | None = None
        self._writers: list[PartsWriter] = []
        self._places: dict[str, list[tuple[ShardPart, PartsWriter, Part]]] = {key: [] for key in contents.tensors}
        """Of each tensor the parts in the order of its shard, and in which file each is."""
        self._collected: dict[tuple[str, int], tuple[torch.Tensor, dict[int, int]]] = {}
        """Of parts whose elements are written in another order than they come in: those that are there, from where and how many.

        By the tensor's key and where the part begins in the shard.
        """
        self._lock = threading.RLock()

    @property
    def manifest_bytes(self) -> int:
        """The most bytes that the manifest of this rank's files takes."""
        return sum(
            len(as_json({part.key: _described(part, [_LARGEST] * -(-(part.end - part.begin) // CHECKED_BYTES))}))
            for layout in self._layouts
            for part in layout.parts
        ) + sum(map(len, self._names))

    def allocate(self, slot: Slot | None = None) -> None:
        """Make the files, with all their space, of what a slot holds as far as there is one; the rest of it is freed.

        Raises `OSError` with errno and path where there is too little, or a quota.
        """
        engine = self._engine = Engine()
        staging = StagingBuffers(_STAGING_COUNT, _STAGING_BYTES)
        self._slot = slot
        for number, (name, layout) in enumerate(zip(self._names, self._layouts, strict=True)):
            reserved = slot.files[number] if slot is not None and number < len(slot.files) else None
            writer = PartsWriter(self._folder / name, layout, engine, staging, reserved)
            self._writers.append(writer)
            for part in layout.parts:
                places = self._places[part.key]
                places.append((self._contents.tensors[part.key].parts[len(places)], writer, part))

    def write(self) -> None:
        """Write what `RankContents.values` yields. Raises `OSError`."""
        for key, start, values in self._contents.values():
            self.put(key, start, values)

    def finish(self) -> None:
        """Sync the files, and describe them in a manifest, which is there as a whole or not at all. Raises `OSError`."""
        described = {}
        for name, writer in zip(self._names, self._writers, strict=True):
            checksums = writer.finish()
            described[name] = {part.key: _described(part, checksums[part.key]) for part in writer.layout.parts}
        if self._slot is not None:
            self._slot.close()
        draft = self._folder / f".{rank_manifest(self._rank)}"
        write_new(draft, as_json(described))
        draft.rename(self._folder / rank_manifest(self._rank))

    def put(self, key: str, start: int, values: torch.Tensor) -> None:
        """Write elements of a tensor, from number `start` of this rank's shard on, flat in host memory; they are copied.

        Any thread may, of different elements. Raises `OSError`.
        """
        places = self._places[key]
        number = max(0, bisect.bisect_right(places, start, key=lambda place: place[0].start) - 1)
        for shard_part, writer, part in places[number:]:
            first = max(start, shard_part.start)
            last = min(start + values.numel(), shard_part.start + part.rectangle.numel)
            if start + values.numel() <= shard_part.start:
                break
            if first >= last:
                continue
            piece = values[first - start : last - start]
            if shard_part.order is None:
                writer.write(part, first - shard_part.start, piece)
            else:
                self._collect(shard_part, writer, part, first - shard_part.start, piece)

    def _collect(self, shard_part: ShardPart, writer: PartsWriter, part: Part, start: int, values: torch.Tensor) -> None:
        """Keep elements of a part, which is small, until all are there; then write it."""
        with self._lock:
            numel, place = part.rectangle.numel, (part.key, shard_part.start)
            flat, found = self._collected.setdefault(place, (torch.empty(numel, dtype=part.dtype), {}))
            flat[start : start + values.numel()].copy_(values)
            found[start] = values.numel()
            if sum(found.values()) == numel:
                writer.write(part, 0, shard_part.rearranged(flat))
                del self._collected[place]

    def close(self) -> None:
        """Wait for what is under way and close the files."""
        while self._writers:
            self._writers.pop().abandon()
        if self._slot is not None:
            self._slot.close()
        if self._engine is not None:
            self._engine.close()


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user has left on the drive of a folder; all there can be where the filesystem counts none."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def check_space(folder: Path, size: int, lacking: int | None = None) -> None:
    """Raise `OSError`, naming the folder, where its drive has too little left for a checkpoint of `size` bytes and manifests.

    `lacking`: the bytes that no rank has reserved, where some have.
    """
    needed = size if lacking is None else lacking
    free, spare = free_bytes(folder), SPARE_BYTES if lacking is None or lacking else 0
    if free < needed + spare:
        reserved = f", {size - needed:,} of them reserved" if lacking is not None else ""
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: a checkpoint of {size:,} bytes{reserved}, and {free:,} are free. Nothing was written; "
            f"free {needed + spare - free:,} bytes more, keep fewer checkpoints, or save elsewhere",
            os.fspath(folder),
        )


def _described(part: Part, checksums: Sequence[int]) -> dict[str, Any]:
    rectangle = part.rectangle
    return {"offsets": rectangle.offsets, "sizes": rectangle.sizes, "begin": part.begin, "crc32c": checksums}
