"""Tiles of large parameters: boxes that lie in one stretch of memory each, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from zinf_compile.errors import OptionError

from .formats import StateFormat, format_of

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: [start, end) in each dimension."""

VECTOR = 16
"""Elements of a stretch that every processor's vectors divide: what is left of one, a fused optimizer may round otherwise."""

PRODUCT_ROWS = (64, 16)
"""Rows of which tiles have a multiple, the first of these where it makes them an eighth larger at most: matrix products with 547
rows take a tenth longer than with 576."""

MOST_TILES = 1024
"""Of one parameter: each is a few operators of the graph."""


class Cuttable(Protocol):
    """A tensor, as far as cutting it goes."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""

    @property
    def dtype(self) -> torch.dtype:
        """Its data type."""

    def stride(self) -> tuple[int, ...]:
        """Its strides."""


def choose_tiles(
    shape: Sequence[int], stride: Sequence[int], stored: StateFormat, *, limit_bytes: int, world_size: int
) -> tuple[Box, ...]:
    """Cut a dense tensor into equal row tiles (the last one shorter) of at most `limit_bytes`; none where it is no larger.

    Rows are taken along the dimension that is outermost in memory; a row that is too large by itself is cut along the next one.
    All tiles but the last have a multiple of `world_size` elements, so that the shards of all tiles, one after the other, are as
    long as the shard of the whole: a tile may have up to `world_size` rows for that. Where that makes none too large, the shards
    are whole vectors. Without a way to do so there are no tiles.
    """
    if len(shape) < 2 or stored.bytes(math.prod(shape)) <= limit_bytes:
        return ()
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] != 1))
    sizes, most = [shape[dim] for dim in order], max(1, stored.numel_within(limit_bytes))
    place = {dim: position for position, dim in enumerate(order)}
    for multiple in (VECTOR * world_size, world_size):
        boxes = _cut(sizes, most, multiple)
        fits = multiple == world_size or all(_numel(box) <= most for box in boxes)
        if len(boxes) > 1 and fits and not any(_numel(box) % multiple for box in boxes[:-1]):
            return tuple(tuple(box[place[dim]] for dim in range(len(shape))) for box in boxes)
    return ()


def cut_parameter(parameter: Cuttable, name: str, limit_bytes: int | None, world_size: int) -> tuple[Box, ...]:
    """Return the tiles of a parameter, none without a limit; raise `OptionError` where they would be too many."""
    if limit_bytes is None:
        return ()
    shape, stored = tuple(parameter.shape), format_of(parameter.dtype)
    boxes = choose_tiles(shape, parameter.stride(), stored, limit_bytes=limit_bytes, world_size=world_size)
    if len(boxes) > MOST_TILES:
        size = stored.bytes(math.prod(shape))
        raise OptionError(
            f"tiles of {limit_bytes:,} bytes (option tile, or a quarter of device_memory) cut parameter {name}, shape "
            f"{list(shape)}, {size:,} bytes, into {len(boxes):,}; a graph takes up to {MOST_TILES:,} of one parameter. Accepted: "
            f"tile of {-(-size // MOST_TILES) * 2:,} bytes or more"
        )
    return boxes


def tile_shape(box: Box) -> tuple[int, ...]:
    """Return the sizes of a box."""
    return tuple(end - start for start, end in box)


def tile_stride(box: Box, stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a box that lies alone in memory, in the order of dimensions of the tensor it was cut from."""
    shape, found, step = tile_shape(box), [0] * len(box), 1
    for dim in sorted(range(len(box)), key=lambda dim: (stride[dim], shape[dim] == 1)):
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


def borders_of(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return where tiles begin and the last one ends, in elements of the whole's memory."""
    borders = [0]
    for box in boxes:
        borders.append(borders[-1] + _numel(box))
    return tuple(borders)


def box_text(box: Box, shape: Sequence[int]) -> str:
    """Show a box as Python indexes it: `[0:512]`, `[3, 0:128]`."""
    parts = [
        f"{start}:{end}" if end - start > 1 or size == 1 else str(start) for (start, end), size in zip(box, shape, strict=True)
    ]
    while len(parts) > 1 and box[len(parts) - 1] == (0, shape[len(parts) - 1]):
        parts.pop()
    return f"[{', '.join(parts)}]"


def _cut(sizes: Sequence[int], most: int, multiple: int) -> list[Box]:
    """Cut a tensor whose dimensions are in the order of its memory into boxes of at most `most` elements, a `multiple` each."""
    row = math.prod(sizes[1:])
    if row > most and len(sizes) > 1:
        return [((index, index + 1), *rest) for index in range(sizes[0]) for rest in _cut(sizes[1:], most, multiple)]
    step = multiple // math.gcd(multiple, row)
    count = -(-sizes[0] // max(1, most // row))
    even = -(-sizes[0] // count)
    rows = -(-even // step) * step
    for together in PRODUCT_ROWS:
        multiple_of = math.lcm(step, together)
        more = -(-even // multiple_of) * multiple_of
        if more <= min(most // row, even + even // 8):
            rows = more
            break
    full = tuple((0, size) for size in sizes[1:])
    return [((start, min(sizes[0], start + rows)), *full) for start in range(0, sizes[0], rows)]


def _numel(box: Box) -> int:
    return math.prod(end - start for start, end in box)
