"""Reads any flat range of a saved tensor in row-major order, in whatever rectangles it was saved.

Called by `zinf consolidate`. Tensors in channels-last are saved in rectangles whose elements are apart from each other.
"""

from __future__ import annotations

import math

import torch

from .rectangles import Rectangle, cut_rectangles
from .saved_files import SavedFiles, SavedPart


def read_range(files: SavedFiles, key: str, start: int, end: int) -> torch.Tensor:
    """Return the elements [start, end) of a tensor, flat in host memory, in the type in which they were saved.

    Takes memory for them and for one part of the tensor that lies across them. Raises `CheckpointError` for a damaged file.
    """
    tensor = files.tensors[key]
    found = torch.empty(end - start, dtype=tensor.dtype)
    if tensor.in_runs:
        if found.numel():
            files.read(key, start, found)
        return found
    done = 0
    for window in cut_rectangles(tensor.shape, start, end):
        _fill(files, key, window, found[done : done + window.numel].view(window.sizes))
        done += window.numel
    return found


def _fill(files: SavedFiles, key: str, window: Rectangle, into: torch.Tensor) -> None:
    for part in files.tensors[key].parts:
        low = [max(a, b) for a, b in zip(window.offsets, part.rectangle.offsets, strict=True)]
        high = [min(a, b) for a, b in zip(_end(window), _end(part.rectangle), strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            values = _rows(files, key, part, low[0], high[0])
            inside = [slice(a - o, b - o) for a, b, o in zip(low[1:], high[1:], part.rectangle.offsets[1:], strict=True)]
            outside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, window.offsets, strict=True))
            into[outside] = values[(slice(None), *inside)]


def _rows(files: SavedFiles, key: str, part: SavedPart, first: int, last: int) -> torch.Tensor:
    """Return the rows [first, last) of the tensor that a part has, as wide as the part is."""
    rectangle = part.rectangle
    width, offset = math.prod(rectangle.sizes[1:]), rectangle.offsets[0]
    values = torch.empty((last - first) * width, dtype=files.tensors[key].dtype)
    files.read_part(key, part, (first - offset) * width, values)
    return values.view(last - first, *rectangle.sizes[1:])


def _end(rectangle: Rectangle) -> list[int]:
    return [offset + size for offset, size in zip(rectangle.offsets, rectangle.sizes, strict=True)]
