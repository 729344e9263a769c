"""Pieces of shards, and chunks of pieces of about equal size."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence

from .sizes import PIECE_ALIGN, SMALL_NUMEL


class Granularity(enum.Enum):
    """The elements that an update of states needs at once."""

    RANGE = "range"
    """Any elements by themselves: element-wise optimizers."""
    MATRIX = "matrix"
    """All elements of a parameter: optimizers that orthogonalise or factorise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """The division of one parameter's states into pieces, and their owner."""

    granularity: Granularity = Granularity.RANGE
    owner: int | None = None
    """The rank that has all pieces, by its number in the unit's `ShardGroup`; None: all ranks, each those of its own shard."""

    def cut(self, numel: int, *, piece_numel: int, cuts: Sequence[int], rank: int) -> list[tuple[int, int]]:
        """Return the pieces [start, end) that a rank has of `numel` elements of states: of its shard, or of what it owns."""
        if self.owner not in (None, rank):
            return []
        if self.granularity is Granularity.MATRIX:
            return [(0, numel)] if numel else []
        return cut_pieces(numel, piece_numel=piece_numel, cuts=cuts)


BY_RANGE = Division()
"""Of all parameters today."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A range of one shard, and its place in a chunk; all in elements."""

    shard: int
    start: int
    end: int
    place: int
    granularity: Granularity = Granularity.RANGE
    owner: int | None = None
    """See `Division`."""


def cut_pieces(numel: int, *, piece_numel: int, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Cut a shard into ranges [start, end) of `piece_numel` elements, the last one shorter; anew at each of `cuts`."""
    return [
        (start, min(end, start + piece_numel))
        for first, end in itertools.pairwise([0, *cuts, numel])
        for start in range(first, end, piece_numel)
    ]


def cut_chunks(
    sizes: Sequence[int],
    *,
    piece_numel: int,
    chunk_numel: int | None = None,
    cuts: Sequence[Sequence[int]] | None = None,
    divisions: Sequence[Division] | None = None,
    rank: int = 0,
) -> list[tuple[Piece, ...]]:
    """Fill chunks of up to `piece_numel` elements, gaps included, with the pieces of shards of these sizes: small shards first.

    `chunk_numel`: fewer elements of a chunk than that, where it was planned so.

    One gather may bring the small units of all layers, such as those that autocast leaves in full precision. In the chunks of
    their layers the last of these would be updated at the end of a step, and the forward behind it would wait for all of it.

    `cuts` are where each shard is cut besides, `divisions` (by default all by range) say which pieces this `rank` has. A chunk
    has one piece of each shard. A piece that doesn't fit into what is left of a chunk begins the next one, and so does what comes
    behind the last piece of a large shard, whose gradient may come late; one alone may exceed a chunk by its gap, or because it
    is a matrix.
    """
    chunks: list[list[Piece]] = []
    used, most = 0, min(piece_numel, chunk_numel or piece_numel)
    rows = zip(sizes, cuts or [()] * len(sizes), divisions or [BY_RANGE] * len(sizes), strict=True)
    for shard, (size, own, division) in sorted(enumerate(rows), key=lambda row: sizes[row[0]] > SMALL_NUMEL):
        for start, end in division.cut(size, piece_numel=piece_numel, cuts=own, rank=rank):
            room = -(-(end - start) // PIECE_ALIGN) * PIECE_ALIGN
            if not chunks or used + room > most or chunks[-1][-1].shard == shard or chunks[-1][-1].start:
                chunks.append([])
                used = 0
            chunks[-1].append(Piece(shard, start, end, used, division.granularity, division.owner))
            used += room
    return [tuple(chunk) for chunk in chunks]


def chunk_end(chunk: Sequence[Piece]) -> int:
    """Return the elements of a chunk, gaps included."""
    return max(piece.place + -(-(piece.end - piece.start) // PIECE_ALIGN) * PIECE_ALIGN for piece in chunk)
