from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.plan.kept_units import choose_kept

SIZES = st.lists(st.integers(1, 50), max_size=12)


@given(SIZES, st.integers(0, 300))
def test_what_is_kept_fits_and_what_is_left_out_does_not(sizes: list[int], room: int) -> None:
    kept = choose_kept(sizes, room)
    assert kept == sorted(set(kept))
    assert sum(sizes[number] for number in kept) <= room
    for number in set(range(len(sizes))) - set(kept):
        assert sizes[number] + sum(sizes[each] for each in kept if each > number) > room


@given(SIZES)
def test_zero_keeps_nothing_and_room_for_all_keeps_all(sizes: list[int]) -> None:
    assert choose_kept(sizes, 0) == []
    assert choose_kept(sizes, sum(sizes)) == list(range(len(sizes)))


def test_the_last_one_comes_first() -> None:
    assert choose_kept([3, 3, 3], 6) == [1, 2]
    assert choose_kept([3, 9, 3], 7) == [0, 2], "what doesn't fit is left out"
