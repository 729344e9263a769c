from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from irtext import example_of, graph_of, lines_of, results, text_of, unit

from zinf_compile.passes.schedule.prefetch import choose_stages, prefetch
from zinf_compile.passes.verify import peak_gathered_bytes, verify

UNIT = 64
"""Bytes of a 4x4 parameter."""
X, W = torch.empty(4, 4), unit(4, 4)

BEFORE = """
g = all_gather(w0, 0)
v = wait(g)
a = mm(x, v)
release(v)
h = all_gather(w1, 1)
u = wait(h)
b = mm(a, u)
"""
AFTER = """
g = all_gather(w0, 0)
h = all_gather(w1, 1)
v = wait(g)
a = mm(x, v)
release(v)
u = wait(h)
b = mm(a, u)
"""


def chain(length: int, *, first: str = "") -> str:
    """Return the text of `length` products, each with a unit of its own, just in time."""
    stages = [
        f"g{i} = all_gather(w{i}, {i})\nv{i} = wait(g{i})\na{i + 1} = mm(a{i}, v{i})\nrelease(v{i})\n" for i in range(length)
    ]
    return first + "".join(stages) + f"return (a{length},)\n"


def chain_graph(length: int, *, first: str = "", source: str = "a0") -> torch.fx.GraphModule:
    return graph_of(chain(length, first=first), **{source: X}, **{f"w{i}": W for i in range(length)})


def starts(gm: torch.fx.GraphModule) -> list[int]:
    """Return for each gather, in order, how many products run before it starts."""
    lines = text_of(gm).splitlines()
    gathers = [i for i, line in enumerate(lines) if "all_gather" in line]
    assert [lines[i].split(" ")[0] for i in gathers] == [f"g{k}" for k in range(len(gathers))], "the order changed"
    return [sum("mm(" in line for line in lines[:i]) for i in gathers]


def test_docstring_example() -> None:
    gm = graph_of(BEFORE + "release(u)", x=X, w0=W, w1=W)
    assert text_of(prefetch(gm, look_ahead=1, limit_bytes=2 * UNIT)) == AFTER.lstrip() + "release(u)\n"
    assert example_of(prefetch) == (lines_of(BEFORE), lines_of(AFTER))


def test_look_ahead_counts_groups() -> None:
    assert starts(prefetch(chain_graph(4), look_ahead=1, limit_bytes=9 * UNIT)) == [0, 0, 1, 2]
    assert starts(prefetch(chain_graph(4), look_ahead=2, limit_bytes=9 * UNIT)) == [0, 0, 0, 1]


def test_bytes_limit_the_look_ahead() -> None:
    gm = prefetch(chain_graph(4), look_ahead=3, limit_bytes=2 * UNIT)
    assert starts(gm) == [0, 0, 1, 2]
    verify(gm, limit_bytes=2 * UNIT)


def test_nothing_fits_beside_the_unit_in_use() -> None:
    gm = prefetch(chain_graph(3), look_ahead=1, limit_bytes=2 * UNIT - 1)
    assert text_of(gm) == chain(3)


def test_groups_that_stand_together_start_together_and_count_as_one() -> None:
    stages = [
        f"g{i} = all_gather(w{i}, {2 * i}); h{i} = all_gather(u{i}, {2 * i + 1}, dtype=torch.bfloat16)\n"
        f"v{i} = wait(g{i}); z{i} = wait(h{i}); c{i} = mm(a{i}, v{i}); a{i + 1} = mul(c{i}, z{i}); release(v{i}); release(z{i})\n"
        for i in range(3)
    ]
    inputs = {"a0": X, **{f"{name}{i}": W for name in "wu" for i in range(3)}}
    gathers = {}
    for limit in (3 * UNIT, 3 * UNIT - 1):  # two units, of which one in half its bytes, beside as many in use
        gm = prefetch(graph_of("".join(stages) + "return (a3,)", **inputs), look_ahead=1, limit_bytes=limit)
        verify(gm, limit_bytes=limit)
        lines = text_of(gm).splitlines()
        gathers[limit] = [sum("mm(" in line for line in lines[:i]) for i, line in enumerate(lines) if "all_gather" in line]
    assert gathers == {3 * UNIT: [0, 0, 0, 0, 1, 1], 3 * UNIT - 1: [0, 0, 1, 1, 2, 2]}


def test_the_first_group_starts_with_the_graph() -> None:
    gm = graph_of("a = relu(x); g = all_gather(w0, 0); h = all_gather(w1, 0); v = wait(g); u = wait(h); b = mm(a, v);"
                  "release(v); c = mm(b, u); release(u)", x=X, w0=W, w1=W)  # fmt: skip
    assert text_of(prefetch(gm, look_ahead=0, limit_bytes=UNIT)).splitlines()[:3] == [
        "g = all_gather(w0, 0)",
        "h = all_gather(w1, 0)",
        "a = relu(x)",
    ]


def test_a_first_group_of_several_that_starts_the_graph_keeps_its_order() -> None:
    text = (
        "g = all_gather(w0, 0)\nh = all_gather(w1, 0)\ni = all_gather(w2, 0)\nv = wait(g)\nu = wait(h)\nt = wait(i)\n"
        "release(v)\nrelease(u)\nrelease(t)\n"
    )
    assert text_of(prefetch(graph_of(text, w0=W, w1=W, w2=W), look_ahead=1, limit_bytes=9 * UNIT)) == text


def test_a_graph_without_gathers_is_unchanged() -> None:
    text = "a = relu(x)\ns = reduce_scatter(a, w)\nreturn (s,)\n"
    assert text_of(prefetch(graph_of(text, x=X, w=W), look_ahead=1, limit_bytes=UNIT)) == text


def test_numbers_stay() -> None:
    gm = chain_graph(4, first="a0 = relu(x)\n", source="x")
    before = results(gm)
    verify(prefetch(gm, look_ahead=2, limit_bytes=3 * UNIT))
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[int]], list[list[tuple[int, int]]], int, int]:
    """Draw the sizes of each group's units, the stage at which each unit is released, look-ahead and limit."""
    groups = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=12))
    released = [[(draw(st.integers(number, len(groups) - 1)), size) for size in units] for number, units in enumerate(groups)]
    return groups, released, draw(st.integers(0, 4)), draw(st.integers(0, 60))


def live_bytes(sizes: list[int], released: list[list[tuple[int, int]]], starts: list[int]) -> list[int]:
    """Replay: the bytes held at some moment of each stage, where what a stage releases is still there."""
    live = []
    for stage in range(len(sizes)):
        started = sum(size for size, start in zip(sizes, starts, strict=True) if start <= stage)
        gone = sum(size for units in released for end, size in units if end < stage)
        live.append(started - gone)
    return live


@given(problems())
def test_starts_keep_order_limit_and_look_ahead(
    problem: tuple[list[list[int]], list[list[tuple[int, int]]], int, int],
) -> None:
    groups, released, look_ahead, limit_bytes = problem
    sizes = [sum(units) for units in groups]
    chosen = choose_stages(sizes, released, look_ahead=look_ahead, limit_bytes=limit_bytes)
    assert chosen == sorted(chosen)
    assert all(number - look_ahead <= stage <= number for number, stage in enumerate(chosen))
    just_in_time = live_bytes(sizes, released, list(range(len(sizes))))
    for early, late in zip(live_bytes(sizes, released, chosen), just_in_time, strict=True):
        assert early <= max(limit_bytes, late), "an early start broke the limit"
    for number, stage in enumerate(chosen):
        earlier = [*chosen[:number], stage - 1, *range(number + 1, len(sizes))]
        blocked = stage == max(number - look_ahead, 0) or (number and stage == chosen[number - 1])
        assert blocked or live_bytes(sizes, released, earlier)[stage - 1] > limit_bytes, "could have started earlier"


@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 6))
def test_the_graph_holds_what_the_plan_promises(length: int, look_ahead: int, units: int) -> None:
    gm = prefetch(chain_graph(length), look_ahead=look_ahead, limit_bytes=units * UNIT)
    verify(gm, limit_bytes=units * UNIT)
    assert peak_gathered_bytes(gm.graph)[0] == min(units, look_ahead + 1, length) * UNIT
    assert starts(gm)[0] == 0
