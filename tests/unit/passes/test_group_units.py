from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from hypothesis import given
from hypothesis import strategies as st
from irtext import example_of, graph_of, lines_of, results, slot, text_of, unit

from zinf_compile.passes.analysis.blocks import choose_regions
from zinf_compile.passes.schedule.group_units import choose_groups, group_units
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


def test_reductions_at_the_step_stay_where_gradients_are_made() -> None:
    text = "r = reduce_scatter(x, w0, at_step=True); a = relu(y); s = reduce_scatter(a, w1, at_step=True)"
    gm = group_units(graph_of(text, x=X, y=X, w0=W0, w1=W1), bucket_bytes=9 * UNIT)
    assert text_of(gm).splitlines() == text.split("; ")


def test_units_of_two_types_do_not_move_together() -> None:
    half = unit(4, 4, dtype=torch.bfloat16)
    gm = group_units(graph_of(BEFORE.replace("b = mm(a, u)", "b = relu(u)"), x=X, w0=W0, w1=half), bucket_bytes=9 * UNIT)
    assert text_of(gm) == NUMBERED.replace("b = mm(a, u)", "b = relu(u)").lstrip()


def test_what_travels_narrow_is_counted_and_grouped_as_such() -> None:
    text = BEFORE.replace("(w0)", "(w0, dtype=torch.bfloat16)").replace("a = mm(x, v)", "c = _to_copy(v, dtype=torch.float32)")
    text = text.replace("mm(a, u)", "mm(c, u)") + "k = all_gather(w0, dtype=torch.bfloat16); z = wait(k); d = relu(z)"
    gm = group_units(graph_of(text, x=X, w0=W0, w1=W1), bucket_bytes=UNIT)
    assert [line for line in text_of(gm).splitlines() if "gather" in line] == [
        "g = all_gather(w0, 0, dtype=torch.bfloat16)",
        "k = all_gather(w0, 0, dtype=torch.bfloat16)",
        "h = all_gather(w1, 1)",
    ]
    verify(gm, complete=False)


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
def test_groups_of_each_type_are_as_long_as_the_bucket_allows(units: list[tuple[int, torch.dtype]], bucket_bytes: int) -> None:
    slots, types = [slot(i, f"w{i}", numel) for i, (numel, _) in enumerate(units)], [dtype for _, dtype in units]

    def size_of(indices: Iterable[int]) -> int:
        return sum(slots[i].numel * types[i].itemsize for i in indices)

    groups = choose_groups(slots, types, bucket_bytes=bucket_bytes)
    starts = choose_regions(slots, region_bytes=bucket_bytes)
    region_of = {i: range(start, end) for start, end in itertools.pairwise([*starts, len(slots)]) for i in range(start, end)}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for dtype in set(types):
        own = [group for group in groups if types[group[0]] == dtype]
        assert [i for group in own for i in group] == [i for i in range(len(slots)) if types[i] == dtype]
        assert all(len(group) == 1 or size_of(group) <= bucket_bytes for group in own)
        for group, following in itertools.pairwise(own):
            part = [i for i in region_of[following[0]] if types[i] == dtype]
            assert part[0] == following[0], "a region's part was cut"
            assert size_of((*group, *part)) > bucket_bytes, "the next region's part would have fitted"


def test_groups_by_hand() -> None:
    units = [slot(i, "w", n) for i, n in enumerate([16, 16, 40, 8, 8, 8])]  # elements of four bytes
    assert choose_groups(units, [torch.float32] * 6, bucket_bytes=128) == [[0, 1], [2], [3, 4, 5]]
    assert choose_groups(units, [torch.bfloat16] * 6, bucket_bytes=128) == [[0, 1], [2, 3, 4, 5]]


def test_a_block_is_not_cut_where_the_next_group_can_hold_it() -> None:
    units = [slot(i, name, 8) for i, name in enumerate(["wte", "h.0.up", "h.0.down", "h.1.up", "h.1.down"])]
    assert choose_groups(units, [torch.float32] * 5, bucket_bytes=4 * 8 * 4) == [[0, 1, 2], [3, 4]]


def test_norms_in_full_precision_do_not_cut_the_transfers_of_their_blocks() -> None:
    full, half = torch.float32, torch.bfloat16
    units = [slot(0, f"h.{b}.{name}", n) for b in range(4) for name, n in (("norm_1", 2), ("qkv", 8), ("norm_2", 2), ("up", 8))]
    assert choose_groups(units, [full, half, full, half] * 4, bucket_bytes=2 * 2 * 8 * 2) == [
        [0, 2, 4, 6, 8, 10, 12, 14],
        [1, 3, 5, 7],
        [9, 11, 13, 15],
    ]
