"""Rows that embeddings look up in tiled parameters: only they move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from marks import more
from rank_row_rounds import SHAPES, look_up_anywhere, name_rows_that_are_none, read_few_blocks
from ranks import run_ranks

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.row_rounds import rounds_of_rows, rows_on_their_way
from zinf_compile.ir.tiling import Box, choose_tiles


def test_rounds_are_quarters_of_tiles() -> None:
    boxes = (((0, 6), (0, 3)), ((6, 11), (0, 3)), ((11, 12), (0, 3)))
    rounds = rounds_of_rows((12, 3), (3, 1), boxes)
    assert rounds == [(0, 0, 2), (0, 2, 4), (0, 4, 6), (1, 6, 8), (1, 8, 10), (1, 10, 11), (2, 11, 12)]


@pytest.mark.parametrize(
    ("shape", "stride", "boxes"),
    [
        ((4, 6), (1, 4), (((0, 4), (0, 3)), ((0, 4), (3, 6)))),
        ((2, 6), (6, 1), (((0, 1), (0, 3)), ((0, 1), (3, 6)), ((1, 2), (0, 3)), ((1, 2), (3, 6)))),
        ((2, 3, 4), (12, 4, 1), (((0, 1), (0, 3), (0, 4)), ((1, 2), (0, 3), (0, 4)))),
        ((0, 4), (4, 1), ()),
    ],
    ids=["columns are outermost", "a row is in several tiles", "no matrix", "nothing"],
)
def test_where_rows_do_not_lie_in_tiles_there_are_none(
    shape: tuple[int, ...], stride: tuple[int, ...], boxes: tuple[Box, ...]
) -> None:
    assert rounds_of_rows(shape, stride, boxes) == []


def test_what_is_on_its_way_is_bounded_by_the_tile() -> None:
    slot = ParameterSlot(
        index=0, name="w", shape=(64, 8), stride=(8, 1), dtype=torch.float32, device=torch.device("cpu"),
        requires_grad=True, tiles=choose_tiles((64, 8), (8, 1), format_of(torch.float32), limit_bytes=16 * 8 * 4, world_size=1),
    )  # fmt: skip
    assert rows_on_their_way(slot) == (2 * 4 + 16) * 8 * 4


@pytest.mark.parametrize("every", [False, more(True)])
def test_one_process(every: bool, tmp_path: Path) -> None:
    looked_up = 5 * 5 * len(SHAPES)
    assert look_up_anywhere(0, 1, str(tmp_path), every=every) == (looked_up if every else looked_up // 2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "shapes"), [(3, SHAPES[3:]), more(2, SHAPES[:2]), more(2, SHAPES[2:]), more(3, SHAPES[:3]), more(4, SHAPES)]
)
def test_ranks(size: int, shapes: tuple[tuple[int, int, int], ...], tmp_path: Path) -> None:
    assert run_ranks(look_up_anywhere, size, str(tmp_path), shapes) == [5 * 5 * len(shapes)] * size


def test_only_blocks_with_rows_are_read(tmp_path: Path) -> None:
    block = (1 << 12) * 4
    assert read_few_blocks(0, 1, str(tmp_path)) == [block, 2 * block, block]


@pytest.mark.distributed
def test_indices_out_of_range_on_one_rank_are_told_to_all(tmp_path: Path) -> None:
    told = run_ranks(name_rows_that_are_none, 2, str(tmp_path))
    for rank, (beyond, below) in enumerate(told):
        for message, least, most in ((beyond, 3, 40), (below, -1, 3)):
            here = f" (from {least} to {most} on this one, rank 1)" if rank else ""
            assert message == (
                "index out of range in self: words.weight has 40 rows, and indices lie beyond them on rank 1" + here
            )
