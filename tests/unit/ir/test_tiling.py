"""Where a parameter that is larger than a tile is cut, and how its tiles lie in memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.tiling import borders_of, box_text, choose_tiles, tile_shape, tile_stride

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.permutations(range(3)), st.integers(1, 200), st.integers(1, 4))
def test_tiles_lie_one_after_the_other_in_memory(shape: tuple[int, ...], order: list[int], limit: int, ranks: int) -> None:
    dims = [dim for dim in order if dim < len(shape)]
    whole = torch.arange(math.prod(shape)).view([shape[d] for d in dims]).permute([dims.index(d) for d in range(len(shape))])
    boxes = choose_tiles(shape, whole.stride(), format_of(torch.int8), limit_bytes=limit, world_size=ranks)
    if not boxes:
        return
    assert whole.numel() > limit
    flat, borders = whole.as_strided((whole.numel(),), (1,)), borders_of(boxes)
    assert borders[-1] == whole.numel()
    assert not any(border % ranks for border in borders[:-1])
    for box, start, end in zip(boxes, borders, borders[1:], strict=False):
        tile = torch.empty_strided(tile_shape(box), tile_stride(box, whole.stride()), dtype=whole.dtype)
        tile.as_strided((end - start,), (1,)).copy_(flat[start:end])
        assert torch.equal(tile, whole[tuple(slice(*span) for span in box)])


CUT = {
    "rows": ((8, 4), (4, 1), 8, 1, ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]),
    "rows that don't come out even": ((7, 4), (4, 1), 12, 1, ["[0:3]", "[3:6]", "[6]"]),
    "a transposed layout": ((4, 8), (1, 4), 16, 1, ["[0:4, 0:4]", "[0:4, 4:8]"]),
    "rows too large by themselves": ((2, 8), (8, 1), 4, 1, ["[0, 0:4]", "[0, 4:8]", "[1, 0:4]", "[1, 4:8]"]),
    "experts": ((2, 4, 4), (16, 4, 1), 8, 1, ["[0, 0:2]", "[0, 2:4]", "[1, 0:2]", "[1, 2:4]"]),
    "shards of equal length": ((9, 3), (3, 1), 4, 2, ["[0:2]", "[2:4]", "[4:6]", "[6:8]", "[8]"]),
    "no larger than a tile": ((8, 4), (4, 1), 32, 1, []),
    "a vector": ((100,), (1,), 10, 1, []),
    "columns that can't be divided evenly": ((3, 5), (5, 1), 4, 2, []),
}


@pytest.mark.parametrize("case", CUT)
def test_where_a_parameter_is_cut(case: str) -> None:
    shape, stride, limit, ranks, expected = CUT[case]
    boxes = choose_tiles(shape, stride, format_of(torch.int8), limit_bytes=limit, world_size=ranks)
    assert [box_text(box, shape) for box in boxes] == expected
