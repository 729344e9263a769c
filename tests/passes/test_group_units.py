from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from irtext import example_of, graph_of, lines_of, results, slot, text_of, unit

from zinf_compile.passes.group_units import choose_groups, group_units
from zinf_compile.passes.regions import choose_regions
from zinf_compile.passes.verify import verify

UNIT = 64
"""Bytes of a 4x4 parameter."""
X, W0, W1 = torch.empty(4, 4), unit(4, 4), unit(4, 4)

BEFORE = """
g = all_gather(w0)
v = wait(g)
a = mm(x, v)
h = all_gather(w1)
u = wait(h)
b = mm(a, u)
"""
AFTER = """
g = all_gather(w0, 0)
h = all_gather(w1, 0)
v = wait(g)
a = mm(x, v)
u = wait(h)
b = mm(a, u)
"""
NUMBERED = BEFORE.replace("(w0)", "(w0, 0)").replace("(w1)", "(w1, 1)")


def test_docstring_example() -> None:
    gm = group_units(graph_of(BEFORE, x=X, w0=W0, w1=W1), bucket_bytes=2 * UNIT)
    assert text_of(gm) == AFTER.lstrip()
    assert example_of(group_units) == (lines_of(BEFORE), lines_of(AFTER))


def test_gathers_that_fill_a_bucket_each_stay_where_they_are() -> None:
    gm = group_units(graph_of(BEFORE, x=X, w0=W0, w1=W1), bucket_bytes=2 * UNIT - 1)
    assert text_of(gm) == NUMBERED.lstrip()


def test_units_of_two_types_do_not_move_together() -> None:
    half = unit(4, 4, dtype=torch.bfloat16)
    gm = group_units(graph_of(BEFORE.replace("b = mm(a, u)", "b = relu(u)"), x=X, w0=W0, w1=half), bucket_bytes=9 * UNIT)
    assert text_of(gm) == NUMBERED.replace("b = mm(a, u)", "b = relu(u)").lstrip()


def test_reductions_wait_for_the_last_of_their_group() -> None:
    text = "r = reduce_scatter(d, w0); a = relu(x); s = reduce_scatter(a, w1); b = relu(a); return (r, s, b)"
    gm = group_units(graph_of(text, d=X, x=X, w0=W0, w1=W1), bucket_bytes=2 * UNIT)
    assert text_of(gm).splitlines() == [
        "a = relu(x)",
        "r = reduce_scatter(d, w0, 0)",
        "s = reduce_scatter(a, w1, 0)",
        "b = relu(a)",
        "return (r, s, b)",
    ]


def test_a_graph_without_transfers_is_unchanged() -> None:
    text = "a = relu(x)\nreturn (a, w)\n"
    assert text_of(group_units(graph_of(text, x=X, w=W0), bucket_bytes=UNIT)) == text


def test_numbers_stay() -> None:
    gm = graph_of(BEFORE + "r = reduce_scatter(a, w0); s = reduce_scatter(b, w1); return (r, s)", x=X, w0=W0, w1=W1)
    before = results(gm)
    verify(group_units(gm, bucket_bytes=2 * UNIT), complete=False)
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)


TYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(st.lists(st.tuples(st.integers(0, 40), TYPES)), st.integers(1, 200))
def test_groups_are_runs_as_long_as_type_and_bucket_allow(units: list[tuple[int, torch.dtype]], bucket_bytes: int) -> None:
    slots = [slot(i, f"w{i}", numel, dtype=dtype) for i, (numel, dtype) in enumerate(units)]
    groups = choose_groups(slots, bucket_bytes=bucket_bytes)
    assert [i for group in groups for i in group] == list(range(len(slots)))
    for group in groups:
        assert len({slots[i].dtype for i in group}) == 1
        assert len(group) == 1 or sum(slots[i].bytes for i in group) <= bucket_bytes
    starts = choose_regions(slots, region_bytes=bucket_bytes)
    ends = dict(itertools.pairwise([*starts, len(slots)]))
    for group, following in itertools.pairwise(groups):
        first = slots[following[0]]
        if first.dtype == slots[group[0]].dtype:
            assert following[0] in ends, "a region of one type was cut"
            region = range(following[0], ends[following[0]])
            part = itertools.takewhile(lambda i, dtype=first.dtype: slots[i].dtype == dtype, region)
            longer = sum(slots[i].bytes for i in (*group, *part))
            assert longer > bucket_bytes, "the next region would have fitted"


def test_groups_by_hand() -> None:
    sizes = [16, 16, 40, 8, 8, 8]  # elements of four bytes
    assert choose_groups([slot(i, "w", n) for i, n in enumerate(sizes)], bucket_bytes=128) == [[0, 1], [2], [3, 4, 5]]


def test_a_block_is_not_cut_where_the_next_group_can_hold_it() -> None:
    units = [slot(i, name, 8) for i, name in enumerate(["wte", "h.0.up", "h.0.down", "h.1.up", "h.1.down"])]
    assert choose_groups(units, bucket_bytes=4 * 8 * 4) == [[0, 1, 2], [3, 4]]
