"""Flat ranges as rectangles: each element is in one of them, in row-major order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.checkpoint.rectangles import Rectangle, cut_rectangles


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draw a shape and a range of its elements."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    start, end = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, end


@given(ranges())
def test_every_element_is_in_one_rectangle(case: tuple[list[int], int, int]) -> None:
    shape, start, end = case
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    found = cut_rectangles(shape, start, end)
    parts = [numbers[tuple(slice(o, o + s) for o, s in zip(r.offsets, r.sizes, strict=True))] for r in found]
    assert [part.numel() for part in parts] == [rectangle.numel for rectangle in found]
    assert [n for part in parts for n in part.flatten().tolist()] == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_rectangle() -> None:
    assert cut_rectangles((5, 3), 2, 13) == [Rectangle((0, 2), (1, 1)), Rectangle((1, 0), (3, 3)), Rectangle((4, 0), (1, 1))]
    assert cut_rectangles((5, 3), 0, 15) == [Rectangle((0, 0), (5, 3))]
    assert cut_rectangles((5, 3), 4, 5) == [Rectangle((1, 1), (1, 1))]
    assert cut_rectangles((), 0, 1) == [Rectangle((), ())]


@pytest.mark.parametrize("wrong", [(-1, 2), (3, 2), (0, 16)])
def test_a_range_that_is_not_there(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"of a tensor of 15 elements, \[5, 3\]"):
        cut_rectangles((5, 3), *wrong)
