"""Cut a row of shards into chunks of about equal size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

ALIGN = 64
"""Shards begin, and are cut, at multiples of this many elements: aligned in memory, and whole vectors for every kernel."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one shard, and its place in a chunk; all in elements."""

    shard: int
    start: int
    end: int
    place: int


def cut_chunks(sizes: Sequence[int], *, chunk_numel: int) -> list[tuple[Piece, ...]]:
    """Fill chunks of up to `chunk_numel` elements (a multiple of `ALIGN`) with shards of these sizes, in order.

    A shard that doesn't fit into what is left of a chunk goes on in the next one.
    """
    chunks: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    used = 0
    for shard, size in enumerate(sizes):
        start = 0
        while start < size:
            if used == chunk_numel:
                chunks.append(tuple(pieces))
                pieces, used = [], 0
            end = min(size, start + chunk_numel - used)
            pieces.append(Piece(shard, start, end, used))
            used += -(-(end - start) // ALIGN) * ALIGN
            start = end
    return [*chunks, tuple(pieces)] if pieces else chunks


def chunk_end(chunk: Sequence[Piece]) -> int:
    """Return the elements of a chunk, gaps included."""
    return max(piece.place + piece.end - piece.start for piece in chunk)
