"""Which chunks one call of an optimizer updates."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.optim.calls import CALL_NUMEL, group_calls

QUARTER = CALL_NUMEL // 4


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=20))
def test_calls_take_all_chunks_in_order_and_no_more_than_fit(chunks: list[tuple[int, bool]]) -> None:
    due = list(range(10, 10 + len(chunks)))
    sizes = {number: quarters * QUARTER for number, (quarters, _) in zip(due, chunks, strict=True)}
    ready = {number for number, (_, is_ready) in zip(due, chunks, strict=True) if is_ready}
    calls = group_calls(due, sizes.__getitem__, ready.__contains__)
    assert list(itertools.chain.from_iterable(calls)) == due
    joinable = ready - {*due[:1], *due[-1:]}
    for call in calls:
        assert len(call) == 1 or (set(call) <= joinable and sum(map(sizes.__getitem__, call)) <= CALL_NUMEL)
    for call, following in itertools.pairwise(calls):
        if {call[0], following[0]} <= joinable:
            assert sum(map(sizes.__getitem__, (*call, following[0]))) > CALL_NUMEL, "what fits is not left to another call"


def test_what_has_to_be_loaded_is_alone() -> None:
    assert group_calls([0, 1, 2, 3], lambda number: 1, lambda number: False) == [[0], [1], [2], [3]]
    assert group_calls([3, 2, 1, 0], lambda number: 1, lambda number: True) == [[3], [2, 1], [0]]
