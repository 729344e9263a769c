from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from irtext import example_of, graph_of, lines_of, results, text_of, unit
from torch import fx

from zinf_compile.passes.graph.node_facts import slot_behind
from zinf_compile.passes.schedule.insert_swaps import insert_swaps
from zinf_compile.passes.schedule.prefetch import choose_stages, prefetch
from zinf_compile.passes.schedule.prefetch_swaps import prefetch_swaps
from zinf_compile.passes.verify import peak_gathered_bytes, verify

UNIT = 64
"""Bytes of a 4x4 parameter."""
X, W = torch.empty(4, 4), unit(4, 4)
COPIED, READ, READ_AND_COPIED = ("host", "device"), ("nvme", "device"), ("nvme", "host", "device")
WAYS = [COPIED, READ, READ_AND_COPIED]

BEFORE = """
s = swap_in(w0, "host", "device", 0)
g = all_gather(s, 0)
v = wait(g)
a = mm(x, v)
release(v)
t = swap_in(w1, "host", "device", 1)
h = all_gather(t, 1)
u = wait(h)
b = mm(a, u)
"""
AFTER = """
s = swap_in(w0, "host", "device", 0)
g = all_gather(s, 0)
t = swap_in(w1, "host", "device", 1)
v = wait(g)
a = mm(x, v)
release(v)
h = all_gather(t, 1)
u = wait(h)
b = mm(a, u)
"""


def scheduled(
    sizes: list[int], way: tuple[str, ...], *, look_ahead: int = 1, limit: int = 99, swap_limit: int = 99
) -> fx.GraphModule:
    """Return a product with each unit, [4, 4 * size], gathered and swapped in ahead of it; limits in units of 4x4."""
    lines = [f"g{i} = all_gather(w{i}, {i}); v{i} = wait(g{i}); a{i} = mm(x, v{i}); release(v{i})" for i in range(len(sizes))]
    last = f"return ({''.join(f'a{i}, ' for i in range(len(sizes)))})"
    gm = graph_of("\n".join([*lines, last]), x=X, **{f"w{i}": unit(4, 4 * size) for i, size in enumerate(sizes)})
    gm = prefetch(gm, look_ahead=look_ahead, limit_bytes=limit * UNIT)
    gm = insert_swaps(gm, params=way, grads=())
    return prefetch_swaps(gm, look_ahead=look_ahead, limit_bytes=swap_limit * UNIT)


def units_of(gm: fx.GraphModule, kind: str) -> list[str]:
    """Return the units of a kind of transfer (read, copied or g), in order."""
    return [slot_behind(node).name for node in gm.graph.nodes if node.name.startswith(kind)]


def starts(gm: fx.GraphModule, kind: str) -> list[int]:
    """Return for each transfer of a kind (read, copied or g), in order, how many products run before it starts."""
    lines = text_of(gm).splitlines()
    return [sum("mm(" in line for line in lines[:i]) for i, line in enumerate(lines) if line.startswith(kind)]


def test_docstring_example() -> None:
    gm = graph_of(BEFORE + "release(u)", x=X, w0=W, w1=W)
    assert text_of(prefetch_swaps(gm, look_ahead=1, limit_bytes=2 * UNIT)) == AFTER.lstrip() + "release(u)\n"
    assert example_of(prefetch_swaps) == (lines_of(BEFORE), lines_of(AFTER))


def test_while_one_group_is_in_use_the_next_is_gathered_another_copied_and_another_read() -> None:
    gm = scheduled([1] * 7, READ_AND_COPIED)
    assert starts(gm, "g") == [0, 0, 1, 2, 3, 4, 5]
    assert starts(gm, "copied") == [0, 0, 0, 1, 2, 3, 4]
    assert starts(gm, "read") == [0, 0, 0, 0, 1, 2, 3]
    lines = text_of(gm).splitlines()
    assert lines[lines.index("release(v0)") :][:6] == [
        "release(v0)",
        "g2 = all_gather(copied_2, 2)",
        'copied_3 = swap_in(read_3, "host", "device", 3)',
        'read_4 = swap_in(w4, "nvme", "host", 4)',
        "v1 = wait(g1)",
        "a1 = mm(x, v1)",
    ]


def test_a_read_that_ends_on_the_device_runs_two_stages_ahead_of_its_gather() -> None:
    gm = scheduled([1] * 6, READ)
    assert starts(gm, "g") == [0, 0, 1, 2, 3, 4]
    assert starts(gm, "read") == [0, 0, 0, 0, 1, 2]


def test_a_copy_runs_one_stage_ahead_of_its_gather() -> None:
    assert starts(scheduled([1] * 5, COPIED), "copied") == [0, 0, 0, 1, 2]


def test_the_first_stage_is_brought_at_the_start_of_the_graph() -> None:
    text = """
        a = relu(x); g = all_gather(w0, 0); h = all_gather(w1, 0); v = wait(g); b = mm(a, v); release(v)
        u = wait(h); c = mm(b, u); release(u)
    """
    gm = prefetch(graph_of(text, x=X, w0=W, w1=W), look_ahead=1, limit_bytes=UNIT)
    gm = prefetch_swaps(insert_swaps(gm, params=READ_AND_COPIED, grads=()), look_ahead=1, limit_bytes=UNIT)
    lines = text_of(gm).splitlines()
    assert [line.split(" ")[0] for line in lines[:7]] == ["read", "read_1", "copied", "copied_1", "g", "h", "a"]


def test_bytes_limit_how_far_swaps_run_ahead() -> None:
    gm = scheduled([1] * 6, READ, limit=2, swap_limit=3)
    assert starts(gm, "g") == [0, 0, 1, 2, 3, 4]
    assert starts(gm, "read") == [0, 0, 0, 1, 2, 3]
    verify(gm, limit_bytes=3 * UNIT)


def test_what_does_not_fit_starts_with_its_gather() -> None:
    gm = scheduled([1, 3, 1, 1], READ, limit=2, swap_limit=3)
    assert starts(gm, "g") == [0, 1, 2, 2]
    assert starts(gm, "read") == [0, 1, 2, 2]


def test_look_ahead_counts_stages_for_each_hop() -> None:
    gm = scheduled([1] * 9, READ_AND_COPIED, look_ahead=2)
    assert starts(gm, "g") == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert starts(gm, "copied") == [0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert starts(gm, "read") == [0, 0, 0, 0, 0, 0, 0, 1, 2]
    assert starts(scheduled([1] * 3, READ_AND_COPIED, look_ahead=0), "read") == [0, 1, 2]


def test_groups_of_two_data_types_that_stand_together_are_brought_together() -> None:
    stages = [
        f"g{i} = all_gather(w{i}, {2 * i}); h{i} = all_gather(u{i}, {2 * i + 1}, dtype=torch.bfloat16)\n"
        f"v{i} = wait(g{i}); z{i} = wait(h{i}); c{i} = mm(x, v{i}); a{i} = mul(c{i}, z{i}); release(v{i}); release(z{i})\n"
        for i in range(3)
    ]
    inputs = {"x": X, **{f"{name}{i}": W for name in "wu" for i in range(3)}}
    reads = {}
    for limit in (4, 3):  # what is read has the unit's own type: a stage's two units take two
        gm = insert_swaps(graph_of("".join(stages) + "return (a0, a1, a2)", **inputs), params=READ, grads=())
        gm = verify(prefetch_swaps(gm, look_ahead=1, limit_bytes=limit * UNIT), limit_bytes=limit * UNIT)
        reads[limit] = starts(gm, "read")
    assert reads == {4: [0, 0, 0, 0, 1, 1], 3: [0, 0, 1, 1, 2, 2]}


def test_units_that_stay_on_the_device_beside_others_that_come() -> None:
    text = """
        g = all_gather(w, 0); h = all_gather(s, 0); v = wait(g); f = wait(h); a = mul(v, f); release(v); release(f)
        k = all_gather(s, 1); z = wait(k); b = mul(a, z); release(z)
        l = all_gather(w, 2); y = wait(l); c = mul(b, y); release(y)
        return (c,)
    """
    gm = insert_swaps(graph_of(text, w=W, s=unit()), params=READ_AND_COPIED, grads=())
    gm = verify(prefetch_swaps(gm, look_ahead=1, limit_bytes=9 * UNIT))
    names = [line.split(" ")[0] for line in text_of(gm).splitlines()]
    assert names[:5] == ["read", "copied", "g", "h", "read_1"]
    assert names[names.index("k") + 1] == "copied_1"


@pytest.mark.parametrize(
    "text",
    [
        "a = relu(x)\ns = reduce_scatter(a, w0)\nreturn (s,)\n",
        "g = all_gather(w0, 0)\nv = wait(g)\na = mm(x, v)\nrelease(v)\nh = all_gather(w1, 1)\nu = wait(h)\nrelease(u)\n",
    ],
)
def test_a_graph_without_swaps_is_unchanged(text: str) -> None:
    assert text_of(prefetch_swaps(graph_of(text, x=X, w0=W, w1=W), look_ahead=1, limit_bytes=99 * UNIT)) == text


@pytest.mark.parametrize("way", WAYS)
def test_numbers_stay(way: tuple[str, ...]) -> None:
    expected = results(scheduled([1, 2, 1, 3, 1], ()))
    torch.testing.assert_close(results(scheduled([1, 2, 1, 3, 1], way)), expected, rtol=0, atol=0)


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=9)


@settings(max_examples=50)  # each builds three graphs
@given(SIZES, st.sampled_from(WAYS), st.integers(0, 2), st.integers(1, 8), st.integers(0, 8))
def test_order_limit_and_collectives_stay(sizes: list[int], way: tuple[str, ...], look_ahead: int, limit: int, more: int) -> None:
    gm = verify(scheduled(sizes, way, look_ahead=look_ahead, limit=limit, swap_limit=limit + more))
    gm.graph.lint()  # no handle is used before it is made
    kinds = [kind for kind in ("read", "copied") if units_of(gm, kind)] + ["g"]
    assert len(kinds) == len(way)
    for kind in kinds:
        assert units_of(gm, kind) == [f"w{i}" for i in range(len(sizes))]
    for earlier, later in itertools.pairwise(kinds):
        assert all(a <= b for a, b in zip(starts(gm, earlier), starts(gm, later), strict=True))
    assert starts(gm, "g") == starts(scheduled(sizes, (), look_ahead=look_ahead, limit=limit), "g")
    just_in_time = scheduled(sizes, way, look_ahead=look_ahead, limit=limit, swap_limit=0)
    assert peak_gathered_bytes(gm.graph)[0] <= max((limit + more) * UNIT, peak_gathered_bytes(just_in_time.graph)[0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]], list[int], int, int]:
    """Draw sizes, releases, when each stage's swaps are due, look-ahead and limit."""
    sizes = draw(st.lists(st.integers(1, 9), max_size=12))
    released = [[(draw(st.integers(number, len(sizes) - 1)), size)] for number, size in enumerate(sizes)]
    due = [0] * len(sizes)
    for number in range(1, len(sizes)):
        due[number] = draw(st.integers(due[number - 1], number))
    return sizes, released, due, draw(st.integers(0, 4)), draw(st.integers(0, 60))


@given(problems())
def test_starts_come_before_they_are_due_and_within_the_limit(
    problem: tuple[list[int], list[list[tuple[int, int]]], list[int], int, int],
) -> None:
    sizes, released, due, look_ahead, limit_bytes = problem
    chosen = choose_stages(sizes, released, look_ahead=look_ahead, limit_bytes=limit_bytes, due=due)
    assert chosen == sorted(chosen)
    assert all(needed - look_ahead <= stage <= needed for needed, stage in zip(due, chosen, strict=True))

    def live(starts: list[int], stage: int) -> int:
        gone = sum(size for releases in released for end, size in releases if end < stage)
        return sum(size for size, start in zip(sizes, starts, strict=True) if start <= stage) - gone

    for stage in range(len(sizes)):
        assert live(chosen, stage) <= max(limit_bytes, live(due, stage)), "an early start broke the limit"
