"""Cut shards into pieces, and put pieces of about equal size together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

PIECE_NUMEL = 4 << 20
"""Elements of a piece: large enough for a drive's full speed, small beside what a process has. Part of the compute shape: fused
optimizers divide each piece over threads by itself."""

ALIGN = 4096
"""Pieces lie in a chunk at multiples of this many elements: at a page, whatever their data type."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one shard, and its place in a chunk; all in elements."""

    shard: int
    start: int
    end: int
    place: int


def cut_pieces(numel: int, *, piece_numel: int) -> list[tuple[int, int]]:
    """Cut a shard into stretches [start, end) of `piece_numel` elements, the last one shorter."""
    return [(start, min(numel, start + piece_numel)) for start in range(0, numel, piece_numel)]


def cut_chunks(sizes: Sequence[int], *, piece_numel: int) -> list[tuple[Piece, ...]]:
    """Fill chunks of up to `piece_numel` elements, gaps included, with the pieces of shards of these sizes, in order.

    A piece that doesn't fit into what is left of a chunk begins the next one; one alone may exceed it by its gap.
    """
    chunks: list[list[Piece]] = []
    used = 0
    for shard, size in enumerate(sizes):
        for start, end in cut_pieces(size, piece_numel=piece_numel):
            room = -(-(end - start) // ALIGN) * ALIGN
            if not chunks or used + room > piece_numel:
                chunks.append([])
                used = 0
            chunks[-1].append(Piece(shard, start, end, used))
            used += room
    return [tuple(chunk) for chunk in chunks]


def chunk_end(chunk: Sequence[Piece]) -> int:
    """Return the elements of a chunk, gaps included."""
    return max(piece.place + -(-(piece.end - piece.start) // ALIGN) * ALIGN for piece in chunk)
