"""Which chunks one call of an optimizer updates."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.ir.chunk_columns import GRADIENT, VALUE, Column
from zinf_compile.optim.calls import LEAST_NUMEL, MOST_NUMEL, call_numel, group_calls, makes_no_copy
from zinf_compile.optim.chunks import MASTER, Chunk

QUARTER = LEAST_NUMEL // 4


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=20))
def test_calls_take_all_chunks_in_order_and_no_more_than_fit(chunks: list[tuple[int, bool]]) -> None:
    due = list(range(10, 10 + len(chunks)))
    sizes = {number: quarters * QUARTER for number, (quarters, _) in zip(due, chunks, strict=True)}
    ready = {number for number, (_, is_ready) in zip(due, chunks, strict=True) if is_ready}
    calls, most = group_calls(due, sizes.__getitem__, ready.__contains__), call_numel(sum(sizes.values()))
    assert list(itertools.chain.from_iterable(calls)) == due
    joinable = ready - {*due[:1], *due[-1:]}
    for call in calls:
        assert len(call) == 1 or (set(call) <= joinable and sum(map(sizes.__getitem__, call)) <= most)
    for call, following in itertools.pairwise(calls):
        if {call[0], following[0]} <= joinable:
            assert sum(map(sizes.__getitem__, (*call, following[0]))) > most, "what fits is not left to another call"


@pytest.mark.parametrize(
    ("total", "expected"), [(1, LEAST_NUMEL), (124_000_000, 20_666_666), (355_000_000, 59_166_666), (10**12, MOST_NUMEL)]
)
def test_a_step_has_several_calls_and_none_is_small(total: int, expected: int) -> None:
    assert call_numel(total) == expected


def test_what_has_to_be_loaded_is_alone() -> None:
    assert group_calls([0, 1, 2, 3], lambda number: 1, lambda number: False) == [[0], [1], [2], [3]]
    assert group_calls([3, 2, 1, 0], lambda number: 1, lambda number: True) == [[3], [2, 1], [0]]


def chunk(dtypes: Mapping[str, torch.dtype]) -> Chunk:
    """Return a chunk whose columns have these types, all where they are updated."""
    columns = {name: Column(dtype, host=False, device=False) for name, dtype in dtypes.items()}
    return Chunk("chunk", 1, (), {}, columns)


@pytest.mark.parametrize(
    ("dtypes", "settings", "joins"),
    [
        ({VALUE: torch.float32, GRADIENT: torch.float32}, {"fused": True}, True),
        ({VALUE: torch.float32, GRADIENT: torch.float32}, {"foreach": True}, False),
        ({VALUE: torch.float32, GRADIENT: torch.bfloat16}, {}, False),
        ({VALUE: torch.bfloat16, MASTER: torch.float32, GRADIENT: torch.float32}, {}, True),
        ({VALUE: torch.bfloat16, MASTER: torch.float32, GRADIENT: torch.bfloat16}, {}, False),
    ],
)
def test_an_update_that_makes_memory_as_large_as_it_is_has_one_chunk(
    dtypes: dict[str, torch.dtype], settings: dict[str, bool], joins: bool
) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1)], **settings)
    assert makes_no_copy(chunk(dtypes), optimizer) is joins
