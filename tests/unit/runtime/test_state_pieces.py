"""What the pieces of states are, by granularity and owner."""

from __future__ import annotations

import pytest

from zinf_compile.ir.pieces import BY_RANGE, Division, Granularity, cut_chunks

MATRIX = Granularity.MATRIX


def _spans(division: Division, *, rank: int = 0) -> list[list[tuple[int, int, int]]]:
    """Cut shards of 9, 10 and 9 pages, the second one divided so, into chunks of 12; return shard and pages by chunk."""
    page = 4096
    divisions = [BY_RANGE, division, BY_RANGE]
    sizes, cuts = [9 * page, 10 * page, 9 * page], [(), (3 * page,), ()]
    chunks = cut_chunks(sizes, piece_numel=12 * page, cuts=cuts, divisions=divisions, rank=rank)
    return [[(piece.shard, piece.start // page, piece.end // page) for piece in chunk] for chunk in chunks]


def test_a_range_is_cut_anywhere() -> None:
    assert _spans(BY_RANGE) == [[(0, 0, 9), (1, 0, 3)], [(1, 3, 10)], [(2, 0, 9)]]


def test_a_matrix_is_one_piece_however_large() -> None:
    assert _spans(Division(MATRIX)) == [[(0, 0, 9)], [(1, 0, 10)], [(2, 0, 9)]]


@pytest.mark.parametrize("granularity", Granularity)
def test_only_its_owner_has_what_one_rank_owns(granularity: Granularity) -> None:
    owned = Division(granularity, owner=2)
    assert _spans(owned, rank=2) == _spans(Division(granularity), rank=2)
    assert _spans(owned, rank=0) == [[(0, 0, 9)], [(2, 0, 9)]]


def test_a_piece_says_what_it_is() -> None:
    divisions = [BY_RANGE, Division(MATRIX, owner=1)]
    pieces = [piece for chunk in cut_chunks([4, 4], piece_numel=8, divisions=divisions, rank=1) for piece in chunk]
    assert [(piece.granularity, piece.owner) for piece in pieces] == [(Granularity.RANGE, None), (MATRIX, 1)]


def test_nothing_has_no_pieces() -> None:
    assert cut_chunks([0, 0], piece_numel=8, divisions=[BY_RANGE, Division(MATRIX)]) == []
