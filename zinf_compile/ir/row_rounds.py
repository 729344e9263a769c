"""Rounds in which rows of a large parameter are looked up: a part of a tile each, which bounds the bytes in transfer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .formats import StateFormat, format_of
from .program import ParameterSlot
from .sizes import BLOCK_BYTES
from .tiling import Box

ROUNDS_PER_TILE = 4

ROUND_BYTES = 16 << 20
"""The most bytes of a round of a parameter without tiles."""


_FLOAT = format_of(torch.float32)


class Round(NamedTuple):
    """Rows [first, last) of a tile."""

    tile: int
    first: int
    last: int


def rounds_of_rows(
    shape: Sequence[int], stride: Sequence[int], boxes: Sequence[Box], stored: StateFormat = _FLOAT
) -> list[Round]:
    """Return the rounds in which rows of a parameter that is cut into `boxes`, or isn't cut, are moved.

    None where it is no matrix, or where tiles aren't whole rows that lie in memory one after the other.
    """
    if len(shape) != 2 or math.prod(shape) == 0 or tuple(stride) != (shape[1], 1):
        return []
    if any(columns != (0, shape[1]) for _, columns in boxes):
        return []
    if not boxes:
        step = max(1, ROUND_BYTES // stored.bytes(shape[1]))
        return [Round(0, first, min(shape[0], first + step)) for first in range(0, shape[0], step)]
    return [part for tile, (rows, _) in enumerate(boxes) for part in _cut(tile, *rows)]


def rows_on_their_way(slot: ParameterSlot) -> int:
    """Return the most bytes that a round takes on one rank: the rows it wants, those it sends, and what is read of a tile."""
    rounds = rounds_of_rows(slot.shape, slot.stride, slot.tiles, slot.format)
    if not rounds:
        return 0
    most = max(last - first for _, first, last in rounds)
    if not slot.tiles:
        part = most * (slot.bytes // slot.shape[0])
        return 2 * part + min(slot.bytes, part + 2 * BLOCK_BYTES)
    tile = max(end - start for (start, end), _ in slot.tiles)
    return (2 * most + tile) * (slot.bytes // slot.shape[0])


def _cut(tile: int, start: int, end: int) -> Iterator[Round]:
    step = -(-(end - start) // ROUNDS_PER_TILE)
    for first in range(start, end, step):
        yield Round(tile, first, min(end, first + step))
