from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from zinf_compile.runtime.memory.cast_order import cast_order


def most(batches: tuple[tuple[int, ...], ...], arrived: list[int], cast: list[int]) -> int:
    held, found = sum(arrived), 0
    for batch in batches:
        held += sum(cast[n] for n in batch)
        found = max(found, held)
        held -= sum(arrived[n] for n in batch)
    return found


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=12))
@example([(4, 8)] * 3)  # wider behind the cast
def test_each_once_in_no_more_memory_than_one_by_one(sizes: list[tuple[int, int]]) -> None:
    arrived, cast = [a for a, _ in sizes], [c for _, c in sizes]
    batches = cast_order(tuple(arrived), tuple(cast))
    assert sorted(itertools.chain(*batches)) == list(range(len(sizes)))
    assert most(batches, arrived, cast) <= most(tuple((n,) for n in range(len(sizes))), arrived, cast)


def test_a_block_of_a_gpt() -> None:
    sizes = [3, 3072, 1, 1024, 4, 4096, 1, 4096]  # KiB of bias and weight of four layers, in fp32
    assert cast_order(tuple(2 * n for n in sizes), tuple(sizes)) == ((0,), (1,), (5,), (7,), (2, 3, 4, 6))


def test_equal_units_and_one_alone() -> None:
    assert cast_order((4, 4, 4, 4), (2, 2, 2, 2)) == ((0,), (1,), (2, 3))
    assert cast_order((4,), (2,)) == ((0,),)
    assert cast_order((0, 0), (0, 0)) == ((0, 1),)
