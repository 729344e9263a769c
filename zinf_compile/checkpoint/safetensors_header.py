"""Parses and validates the header of a safetensors file: refuses what the safetensors library refuses, naming the tensors."""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any

import torch

from zinf_compile.errors import CheckpointError

from .strict_json import parse_object

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_OTHER_BITS = {"F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of types in the format that no parameter can have."""
_MOST_HEADER_BYTES = 100_000_000
"""Limit of the format."""
_MOST_NUMBER = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a header."""

    dtype: torch.dtype | str
    """The format's name for a type that no parameter can have."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int


def read_header(path: Path, fd: int) -> dict[str, Entry]:
    """Return the tensors of a file by name; raise `CheckpointError` naming the file and each tensor at fault."""
    return read_whole_header(path, fd)[0]


def read_whole_header(path: Path, fd: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the same, and what else the file says, as text by name."""
    size = os.fstat(fd).st_size
    try:
        prefix = os.pread(fd, 8, 0)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= min(size - 8, _MOST_HEADER_BYTES):
            raise CheckpointError(
                f"{path} ({size:,} bytes) is not a complete safetensors file: its header would have {length:,} bytes. "
                "Fetch it again"
            )
        raw = os.pread(fd, length, 8)
    except OSError as error:
        raise CheckpointError(f"cannot read the header of {path}: {error.strerror}") from error
    try:
        header = parse_object(raw.decode())
    except TypeError as error:
        raise CheckpointError(f"{path} is no safetensors file: its header is {error}") from error
    except ValueError as error:
        said = f"{path} is no safetensors file: its header is not JSON ({error})"
        raise CheckpointError(said) from error
    metadata = header.pop("__metadata__", None)
    problems = _metadata_problems(metadata)
    entries: dict[str, Entry] = {}
    for name, described in header.items():
        found = _entry(described, 8 + length)
        if isinstance(found, Entry):
            entries[name] = found
        else:
            problems.append(f"{name}{found}")
    problems = problems or _layout_problems(entries, 8 + length, size)
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(
            f"{path} is damaged or was not written to its end: {'; '.join(problems[:20])}{more}. Fetch it again"
        )
    return entries, metadata or {}


def _metadata_problems(metadata: Any) -> list[str]:
    if metadata is None or (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        return []
    return ["__metadata__ is no mapping of text to text"]


def _entry(described: Any, data: int) -> Entry | str:
    """Return the entry of a tensor, or the problem with it."""
    if not isinstance(described, dict) or not {"dtype", "shape", "data_offsets"} <= described.keys():
        return " has no dtype, shape and data_offsets"
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    bits = DTYPES[dtype].itemsize * 8 if isinstance(dtype, str) and dtype in DTYPES else None
    if bits is None and isinstance(dtype, str):
        bits = _OTHER_BITS.get(dtype)
    if bits is None:
        return f" is of type {_brief(dtype)}; accepted: {', '.join([*DTYPES, *_OTHER_BITS])}"
    if not _are_sizes(shape):
        return f" has the shape {_brief(shape)}; accepted: a list of whole numbers from 0 on"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return f" has the data_offsets {_brief(offsets)}; accepted: two whole numbers from 0 on"
    begin, end = offsets
    total = 1
    for length in (*shape, bits):
        total *= length
        if total > _MOST_NUMBER:
            return f" has the shape {_brief(shape)}, of more than 2**64 bits"
    if total != (end - begin) * 8:
        return f", {_brief(shape)} {dtype}, has {end - begin:,} bytes, from {begin:,} to {end:,} of the data"
    return Entry(DTYPES.get(dtype) or str(dtype), tuple(shape), data + begin, data + end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= _MOST_NUMBER for each in value)


def _layout_problems(entries: dict[str, Entry], data: int, size: int) -> list[str]:
    """Return the gaps and overlaps: each byte of the data must belong to exactly one tensor."""
    problems = [f"{name} ends at byte {entry.end:,} of {size:,}" for name, entry in entries.items() if entry.end > size]
    if problems:
        return problems
    before, last = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != before:
            relation = "overlaps" if entry.begin < before else "leaves a gap after"
            return [f"{name} begins at byte {entry.begin:,} and {relation} {last}, which ends at {before:,}"]
        before, last = entry.end, name
    return [f"{size - before:,} bytes follow {last}"] if before != size else []


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
