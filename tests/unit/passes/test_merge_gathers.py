from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from irtext import example_of, graph_of, lines_of, results, text_of, unit
from torch import fx

from zinf_compile.ir.steps import Region
from zinf_compile.passes import graph_passes
from zinf_compile.passes.graph.node_facts import mark_region
from zinf_compile.passes.lower import lower
from zinf_compile.passes.schedule.merge_gathers import Move, choose_kept, merge_gathers
from zinf_compile.passes.verify import peak_gathered_bytes, verify

INPUTS = {"x": torch.empty(4, 4), "w": unit(4, 4), "e": unit(4, 4)}

BEFORE = """
g = all_gather(w)
k = all_gather(e)
v = wait(g)
a = mm(x, v)
release(v)
u = wait(k)
b = mm(a, u)
release(u)
h = all_gather(w)
z = wait(h)
c = mm(b, z)
release(z)
"""
AFTER = """
g = all_gather(w)
k = all_gather(e)
v = wait(g)
a = mm(x, v)
u = wait(k)
b = mm(a, u)
release(u)
c = mm(b, v)
release(v)
"""
ONE_AT_A_TIME = BEFORE.replace("k = all_gather(e)\n", "").replace("u = wait(k)", "k = all_gather(e)\nu = wait(k)")


def test_docstring_example() -> None:
    assert text_of(merge_gathers(graph_of(BEFORE, **INPUTS))) == AFTER.lstrip()
    assert example_of(merge_gathers) == (lines_of(BEFORE), lines_of(AFTER))


def test_what_would_raise_the_peak_is_unchanged() -> None:
    assert text_of(merge_gathers(graph_of(ONE_AT_A_TIME, **INPUTS))) == ONE_AT_A_TIME.lstrip()


def test_a_larger_unit_elsewhere_makes_room() -> None:
    text = ONE_AT_A_TIME + "j = all_gather(head); y = wait(j); d = mm(c, y); release(y); return (d,)"
    gm = merge_gathers(graph_of(text, **INPUTS, head=unit(4, 8)))
    assert text_of(gm).count("all_gather(w)") == 1
    assert peak_gathered_bytes(gm.graph)[0] == 4 * 8 * 4


def in_turn(*names: str) -> str:
    """Return the text of products with the named units, each gathered just in time; the last is returned."""
    lines = [
        f"g{i} = all_gather({name}); v{i} = wait(g{i}); a{i + 1} = mm(a{i}, v{i}); release(v{i})" for i, name in enumerate(names)
    ]
    return "\n".join([*lines, f"return (a{len(names)},)"])


def test_units_used_three_times_are_gathered_once() -> None:
    text = in_turn("w", "e", "w", "e", "w", "e", "head")
    gm = verify(merge_gathers(graph_of(text, a0=torch.empty(4, 4), w=INPUTS["w"], e=INPUTS["e"], head=unit(4, 8))))
    assert [line for line in text_of(gm).splitlines() if "wait" not in line] == [
        "g0 = all_gather(w)", "a1 = mm(a0, v0)", "g1 = all_gather(e)", "a2 = mm(a1, v1)", "a3 = mm(a2, v0)", "a4 = mm(a3, v1)",
        "a5 = mm(a4, v0)", "release(v0)", "a6 = mm(a5, v1)", "release(v1)", "g6 = all_gather(head)", "a7 = mm(a6, v6)",
        "release(v6)", "return (a7,)",
    ]  # fmt: skip


def test_gathers_of_one_unit_in_two_data_types_stay_apart() -> None:
    text = BEFORE.replace("h = all_gather(w)", "h = all_gather(w, dtype=torch.bfloat16)")
    text = text.replace("c = mm(b, z)", "y = _to_copy(z, dtype=torch.float32)\nc = mm(b, y)")
    assert text_of(merge_gathers(graph_of(text, **INPUTS))) == text.lstrip()


def test_a_graph_without_gathers_is_unchanged() -> None:
    text = "a = relu(x)\ns = reduce_scatter(a, w)\nreturn (s,)\n"
    assert text_of(merge_gathers(graph_of(text, **INPUTS))) == text


def test_numbers_stay() -> None:
    gm = graph_of(BEFORE + "return (c,)", **INPUTS)
    before = results(gm)
    verify(merge_gathers(gm))
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)


def regions_of(gm: fx.GraphModule) -> list[list[str]]:
    """Return the operators of each region that `gm` is cut into."""
    found: list[list[str]] = []

    def note(region: fx.GraphModule) -> None:
        found.append([node.name for node in region.graph.nodes if node.op == "call_function"])

    program = lower(gm, name="test", compile_region=note)  # type: ignore[arg-type]
    assert len(found) == sum(isinstance(step, Region) for step in program.steps)
    return found


def test_regions_are_cut_where_they_were() -> None:
    gm = graph_of(in_turn("w", "e", "w", "e", "head"), **{**INPUTS, "a0": INPUTS["x"], "head": unit(4, 8)})
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        mark_region(node)
    before = regions_of(gm)
    assert "a2 = mm(a1, v1)\na3 = mm(a2, v0)\n" in text_of(merge_gathers(gm)), "nothing but the mark is left between the two"
    assert regions_of(gm) == before == [["a1"], ["a2"], ["a3"], ["a4"], ["a5"]]


def test_in_the_pipeline_the_peak_stays_and_less_is_moved() -> None:
    names = [f"w{i}" if i % 6 else "w" for i in range(14)]
    text = "\n".join(f"a{i + 1} = mm(a{i}, {name})" for i, name in enumerate([*names, "head"]))
    inputs = {"a0": INPUTS["x"], **{name: unit(4, 4) for name in dict.fromkeys(names)}, "head": unit(4, 80)}
    gm = graph_of(f"{text}\nreturn (a15,)", **inputs)
    for step in itertools.takewhile(lambda step: step is not merge_gathers, graph_passes(bucket_bytes=64)):
        gm = step(gm)
    peak, regions = peak_gathered_bytes(gm.graph)[0], regions_of(gm)
    assert text_of(gm).count("all_gather(w, ") == 3
    gm = verify(merge_gathers(gm), limit_bytes=peak)
    assert regions_of(gm) == regions
    assert text_of(gm).count("all_gather(w, ") == 1


@st.composite
def sequences(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> list[Move]:
    """Draw gathers and releases, as a legal schedule has them."""
    size = [draw(sizes) for _ in range(4)]
    moves: list[Move] = []
    gathered: set[int] = set()
    for name in draw(st.lists(st.integers(0, 3), max_size=18)):
        moves.append(Move(name, size[name], name not in gathered))
        gathered ^= {name}
    return moves + [Move(name, size[name], False) for name in sorted(gathered)]


def live_bytes(moves: list[Move], held: list[tuple[int, int]]) -> list[int]:
    """Replay: the bytes gathered after each move, without the moves that `held` drops."""
    dropped = {position for pair in held for position in pair}
    changes = [0 if i in dropped else (m.bytes if m.gathers else -m.bytes) for i, m in enumerate(moves)]
    return list(itertools.accumulate(changes))


def gaps(moves: list[Move]) -> list[tuple[int, int]]:
    """List each release with the next gather of its unit."""
    return [
        (i, next(j for j in range(i, len(moves)) if moves[j].gathers and moves[j].unit == move.unit))
        for i, move in enumerate(moves)
        if not move.gathers and any(m.gathers and m.unit == move.unit for m in moves[i:])
    ]


@given(sequences(st.integers(0, 9)))
def test_the_peak_stays_and_what_fits_is_kept(moves: list[Move]) -> None:
    kept = choose_kept(moves)
    assert set(kept) <= set(gaps(moves))
    assert len(kept) == len(set(kept))
    peak = max(live_bytes(moves, []), default=0)
    assert max(live_bytes(moves, kept), default=0) == peak
    if max(live_bytes(moves, gaps(moves)), default=0) == peak:
        assert sorted(kept) == gaps(moves), "all fit together"


@given(sequences(st.just(1)))
def test_for_units_of_one_size_no_choice_keeps_more(moves: list[Move]) -> None:
    peak = max(live_bytes(moves, []), default=0)
    found = gaps(moves)
    best = max(
        len(subset)
        for count in range(len(found) + 1)
        for subset in itertools.combinations(found, count)
        if max(live_bytes(moves, list(subset)), default=0) == peak
    )
    assert len(choose_kept(moves)) == best


def test_where_not_all_fit_the_unit_used_soonest_is_kept() -> None:
    moves = [Move("a", 1, True), Move("b", 1, True), Move("a", 1, False), Move("b", 1, False), Move("c", 1, True),
            Move("c", 1, False), Move("b", 1, True), Move("b", 1, False), Move("a", 1, True), Move("a", 1, False)]  # fmt: skip
    assert choose_kept(moves) == [(3, 6)]
