"""When saved memory leaves and comes back: as late and early as there is room, and what compute waits for then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.plan.saved_schedule import Move, Stretches, seconds_of, spread


def move(number: int, *, left: int, due: int, size: int = 1, seconds: float = 1.0, hops: int = 1) -> Move:
    return Move(
        name=f"v{number}",
        bytes=size,
        left=left,
        due=due,
        out=tuple((f"out {hop}", seconds) for hop in range(hops)),
        back=tuple((f"in {hop}", seconds) for hop in range(hops)),
    )


def even(count: int, room: int | Sequence[int]) -> Stretches:
    return Stretches([1.0] * count, [room] * count if isinstance(room, int) else room)


def test_one_stretch_where_there_is_no_room() -> None:
    (found,) = spread([move(0, left=1, due=4)], even(6, 0), even(6, 0))
    assert (found.lag, found.lead) == (1, 1)


def test_as_long_as_there_is_room() -> None:
    (found,) = spread([move(0, left=1, due=4)], even(6, [0, 0, 0, 1, 1, 0]), even(6, [0, 1, 1, 0, 0, 0]))
    assert found.lag == 3, "beside stretch 2, which has room for it anyway, 3 and 4"
    assert found.lead == 3, "beside stretch 3, 2 and 1"
    (found,) = spread([move(0, left=1, due=4)], even(6, 1), even(6, 1))
    assert (found.lag, found.lead) == (4, 4), "until the last stretch ends; from the first one on"


def test_the_oldest_make_room() -> None:
    moves = [move(n, left=n, due=7 - n) for n in range(4)]
    found = spread(moves, even(8, 2), even(8, 2))
    assert [each.lag for each in found] == [3, 3, 5, 4]
    assert [each.lead for each in found] == [3, 3, 5, 4]


def test_a_transfer_longer_than_a_stretch_hides_beside_several() -> None:
    seconds = [1.0] * 6
    moves = [move(0, left=0, due=5, seconds=4.0)]
    assert seconds_of(moves, seconds, seconds) == 12 + 3 + 3, "beside one stretch each"
    assert seconds_of(spread(moves, even(6, 1), even(6, 1)), seconds, seconds) == 12


def test_transfers_of_one_lane_wait_for_each_other_and_hops_for_the_one_before() -> None:
    seconds = [1.0] * 3
    both = [move(0, left=0, due=2), move(1, left=0, due=2)]
    assert seconds_of(both, seconds, seconds) == 6 + 1 + 1
    other = Move(name="v1", bytes=1, left=0, due=2, out=(("other", 1.0),), back=(("another", 1.0),))
    assert seconds_of([both[0], other], seconds, seconds) == 6
    assert seconds_of([move(0, left=0, due=2, hops=2)], seconds, seconds) == 6
    assert seconds_of([move(0, left=0, due=2, hops=2, seconds=2.0)], seconds, seconds) == 6 + 2 + 2
    shared = Move(name="v", bytes=1, left=2, due=0, out=(("drive", 1.0),), back=(("drive", 1.0),))
    assert seconds_of([shared], seconds, seconds) == 6 + 2, "it is away while nothing is computed"


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(1, 4)), max_size=8),
    st.lists(st.integers(0, 8), min_size=8, max_size=8),
    st.lists(st.integers(0, 8), min_size=8, max_size=8),
)
def test_what_is_on_its_way_has_room(rows: list[tuple[int, int, int]], ahead: list[int], back: list[int]) -> None:
    """Beyond the stretch next to its use, which is in the account of memory; and the wider schedule is never a slower one."""
    moves = [move(n, left=left, due=due, size=size) for n, (left, due, size) in enumerate(rows)]
    found = spread(moves, Stretches([1.0] * 8, ahead), Stretches([1.0] * 8, back))
    for number in range(8):
        assert sum(m.bytes for m in found if m.left + 1 < number <= m.left + m.lag) <= ahead[number]
        assert sum(m.bytes for m in found if m.due - m.lead <= number < m.due - 1) <= back[number]
    assert all(each.lag >= 1 <= each.lead for each in found)


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_moves_in_no_time(count: int) -> None:
    assert seconds_of([], [1.0] * count, [2.0] * count) == 3.0 * count
