"""Free ranges: the first that fits, joined again, against a row of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.runtime.memory.ranges import FreeRanges

Marks = frozenset[int]
END = 24


def _ranges() -> FreeRanges[Marks]:
    return FreeRanges(END, frozenset(), frozenset.union)


def test_the_first_that_fits_is_taken_and_parts_keep_its_mark() -> None:
    ranges = _ranges()
    assert [ranges.take(8) for _ in range(3)] == [(0, frozenset()), (8, frozenset()), (16, frozenset())]
    assert ranges.take(1) is None
    ranges.give(8, 8, frozenset({1}))
    assert ranges.take(3) == (8, frozenset({1}))
    ranges.give(16, 8, frozenset({2}))
    assert ranges.take(13) == (11, frozenset({1, 2})), "neighbours joined"
    assert ranges.free_bytes() == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=50))
def test_it_is_a_row_of_bytes(steps: list[tuple[bool, int]]) -> None:
    ranges, taken = _ranges(), list[tuple[int, int]]()
    free = [True] * END
    for number, (takes, size) in enumerate(steps):
        if takes:
            expected = next((s for s in range(END - size + 1) if all(free[s : s + size])), None)
            found = ranges.take(size)
            assert (None if found is None else found[0]) == expected
            if expected is not None:
                free[expected : expected + size] = [False] * size
                taken.append((expected, size))
        elif taken:
            start, length = taken.pop(size % len(taken))
            free[start : start + length] = [True] * length
            ranges.give(start, length, frozenset({number}))
        assert ranges.free_bytes() == sum(free)
        assert len(ranges.marks()) == sum(here and not before for before, here in zip([False, *free], free, strict=False))
