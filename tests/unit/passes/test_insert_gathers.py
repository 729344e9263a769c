from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from irtext import example_of, graph_of, lines_of, results, slot, text_of, unit

from zinf_compile.passes.schedule.insert_gathers import choose_gathers, insert_gathers
from zinf_compile.passes.verify import verify

UNIT = 64
"""Bytes of a 4x4 parameter."""

BEFORE = """
t = t(w)
a = addmm(b, x, t)
"""
AFTER = """
g = all_gather(b)
f = wait(g)
h = all_gather(w)
v = wait(h)
t = t(v)
a = addmm(f, x, t)
"""


def test_docstring_example() -> None:
    gm = insert_gathers(graph_of(BEFORE, x=torch.empty(2, 3), w=unit(4, 3), b=unit(4)), keep_bytes=UNIT)
    assert text_of(gm, gather="g", full="f", gather_1="h", full_1="v") == AFTER.lstrip()
    assert example_of(insert_gathers) == (lines_of(BEFORE), lines_of(AFTER))


def test_rows_are_looked_up_in_what_is_hollow() -> None:
    gm = graph_of("r = gather_rows(w, i); a = mm(r, w)", w=unit(4, 4), i=torch.zeros(2, dtype=torch.int64))
    lines = text_of(insert_gathers(gm, keep_bytes=UNIT), gather="g", full="v").splitlines()
    assert lines[:4] == ["r = gather_rows(w, i)", "g = all_gather(w)", "v = wait(g)", "a = mm(r, v)"]


def test_a_unit_used_again_soon_is_kept() -> None:
    gm = graph_of("a = mm(x, w); b = mm(a, u); c = mm(b, w)", x=torch.empty(4, 4), w=unit(4, 4), u=unit(4, 4))
    assert text_of(insert_gathers(gm, keep_bytes=UNIT), gather="g", full="v", gather_1="h", full_1="z").split("\n")[4:] == [
        "z = wait(h)",
        "b = mm(a, z)",
        "c = mm(b, v)",
        "",
    ]


def test_a_unit_used_again_after_others_is_gathered_anew() -> None:
    gm = graph_of("a = mm(x, w); b = mm(a, u); c = mm(b, w)", x=torch.empty(4, 4), w=unit(4, 4), u=unit(4, 4))
    assert text_of(insert_gathers(gm, keep_bytes=UNIT - 1)).split("\n")[6:] == [
        "gather_2 = all_gather(w)",
        "full_2 = wait(gather_2)",
        "c = mm(b, full_2)",
        "",
    ]


def test_a_unit_used_twice_by_one_operator_is_gathered_once() -> None:
    gm = insert_gathers(graph_of("t = t(w); a = mm(w, t)", w=unit(4, 4)), keep_bytes=0)
    assert text_of(gm) == "gather = all_gather(w)\nfull = wait(gather)\nt = t(full)\na = mm(full, t)\n"


def test_nothing_to_gather_comes_back_unchanged() -> None:
    text = "a = relu(x)\nn = sym_size(w, 0)\ns = reduce_scatter(a, w)\nreturn (a, w, s)\n"
    gm = insert_gathers(graph_of(text, x=torch.empty(4, 4), w=unit(4, 4), unused=unit(3)), keep_bytes=UNIT)
    assert text_of(gm) == text


def test_a_cast_that_leaves_the_graph_is_made_from_the_full_unit_and_the_hollow_one_may_leave() -> None:
    gm = graph_of("c = _to_copy(w, dtype=torch.bfloat16); return (c, w)", w=unit(4, 4))
    assert text_of(insert_gathers(gm, keep_bytes=UNIT)) == (
        "gather = all_gather(w)\nfull = wait(gather)\nc = _to_copy(full, dtype=torch.bfloat16)\nreturn (c, w)\n"
    )


def test_a_parameter_that_is_its_own_gradient_is_read_but_stays_named() -> None:
    gm = insert_gathers(graph_of("s = reduce_scatter(w, w); return (s,)", w=unit(4, 4)), keep_bytes=UNIT)
    assert text_of(gm) == "gather = all_gather(w)\nfull = wait(gather)\ns = reduce_scatter(full, w)\nreturn (s,)\n"


def test_the_size_of_a_view_is_read_from_the_full_unit() -> None:
    gm = graph_of("t = t(w); n = sym_size(t, 0); a = view(x, [n, 2]); return (a,)", x=torch.empty(4, 2), w=unit(3, 4))
    assert text_of(insert_gathers(gm, keep_bytes=UNIT)).startswith("gather = all_gather(w)\nfull = wait(gather)\nt = t(full)\n")


def test_numbers_stay() -> None:
    gm = graph_of(
        "t = t(w); a = addmm(b, x, t); c = mm(a, w); r = relu(w); return (a, c, r)",
        x=torch.empty(2, 3), w=unit(4, 3), b=unit(4),
    )  # fmt: skip
    before = results(gm)
    verify(insert_gathers(gm, keep_bytes=0), complete=False)
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)


SEQUENCES = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), max_size=30)


@given(SEQUENCES, st.integers(0, 300))
def test_each_use_has_its_unit_and_none_is_kept_past_the_limit(sequence: list[list[int]], keep_bytes: int) -> None:
    units = [slot(i, f"w{i}", 4 * i + 1) for i in range(7)]
    fresh = choose_gathers([tuple(units[i] for i in use) for use in sequence], keep_bytes=keep_bytes)
    moved = 0
    last_use: dict[int, int] = {}
    for use, gathered in zip(sequence, fresh, strict=True):
        assert gathered <= {units[i].key for i in use}
        for i in use:
            kept_past_limit = i in last_use and moved - last_use[i] > keep_bytes
            assert (units[i].key in gathered) == (i not in last_use or kept_past_limit)
            moved += units[i].bytes if units[i].key in gathered else 0
            last_use[i] = moved
