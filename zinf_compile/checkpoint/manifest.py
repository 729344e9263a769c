"""The names and the JSON files of a checkpoint's folder: one manifest of the whole, and one of each rank's files.

Note: The manifest's own checksum
    The last entry of the manifest of the whole, `,"crc32c":...}`, is the checksum of all bytes before its comma. Among these are
    the checksums of the ranks' manifests, which have those of all tensors: all that is loaded is covered. Earlier versions have
    written none; their manifests are read without.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zinf_compile.runtime.storage.engine import crc32c

from .safetensors_writer import new_file, write_all

MANIFEST = "manifest.json"
_SAVED = re.compile(r"save-(\d{8})")
_CHECKSUM = re.compile(rb',"crc32c":(\d{1,10})\}\s*\Z')


def rank_manifest(rank: int) -> str:
    """Return the name of the manifest of a rank's files."""
    return f"rank-{rank:05}.json"


def saved_name(number: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"save-{number:08}"


def partial_name(number: int, token: str) -> str:
    """Return the name of the folder in which a checkpoint is written."""
    return f".{saved_name(number)}-{token}.partial"


def saves_in(folder: Path) -> list[int]:
    """Return the numbers of the whole checkpoints in a folder; none where it is missing."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _SAVED.fullmatch(name)))


def saved_numbers(folder: Path) -> list[int]:
    """Return the numbers that are taken by something in a folder, a checkpoint or not."""
    return [int(match[1]) for entry in folder.iterdir() if (match := _SAVED.fullmatch(entry.name))]


def as_json(content: Any) -> bytes:
    """Return the content of a manifest's file."""
    return (json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n").encode()


def with_checksum(text: bytes) -> bytes:
    """Return the content of a manifest's file with a checksum of itself as its last entry."""
    rest = text.rstrip().removesuffix(b"}")
    return b'%s,"crc32c":%d}\n' % (rest, crc32c(rest))


def matches_own_checksum(text: bytes) -> bool | None:
    """Return whether a manifest's file is as `with_checksum` has returned it; None where it has no checksum of itself."""
    found = _CHECKSUM.search(text)
    return None if found is None else int(found[1]) == crc32c(text[: found.start()])


def write_new(path: Path, text: bytes) -> None:
    """Write a new file, synced."""
    with new_file(path) as fd:
        write_all(fd, memoryview(text))
