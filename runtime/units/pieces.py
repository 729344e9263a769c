"""Cut shards into pieces, and put pieces of about equal size together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from zinf_compile.ir import compute_shape
from zinf_compile.ir.sizes import PIECE_ALIGN

PIECE_NUMEL = compute_shape.PIECE_NUMEL
"""Elements of a piece."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one shard, and its place in a chunk; all in elements."""

    shard: int
    start: int
    end: int
    place: int


def cut_pieces(numel: int, *, piece_numel: int, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Cut a shard into stretches [start, end) of `piece_numel` elements, the last one shorter; anew at each of `cuts`."""
    return [
        (start, min(end, start + piece_numel))
        for first, end in itertools.pairwise([0, *cuts, numel])
        for start in range(first, end, piece_numel)
    ]


def cut_chunks(sizes: Sequence[int], *, piece_numel: int, cuts: Sequence[Sequence[int]] | None = None) -> list[tuple[Piece, ...]]:
    """Fill chunks of up to `piece_numel` elements, gaps included, with the pieces of shards of these sizes, in order.

    `cuts` are where each shard is cut besides. A chunk has one piece of each shard. A piece that doesn't fit into what is left of
    a chunk begins the next one; one alone may exceed it by its gap.
    """
    chunks: list[list[Piece]] = []
    used = 0
    for shard, (size, own) in enumerate(zip(sizes, cuts or [()] * len(sizes), strict=True)):
        for start, end in cut_pieces(size, piece_numel=piece_numel, cuts=own):
            room = -(-(end - start) // PIECE_ALIGN) * PIECE_ALIGN
            if not chunks or used + room > piece_numel or chunks[-1][-1].shard == shard:
                chunks.append([])
                used = 0
            chunks[-1].append(Piece(shard, start, end, used))
            used += room
    return [tuple(chunk) for chunk in chunks]


def chunk_end(chunk: Sequence[Piece]) -> int:
    """Return the elements of a chunk, gaps included."""
    return max(piece.place + -(-(piece.end - piece.start) // PIECE_ALIGN) * PIECE_ALIGN for piece in chunk)
