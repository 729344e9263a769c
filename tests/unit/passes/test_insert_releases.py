from __future__ import annotations

import torch
from irtext import example_of, graph_of, lines_of, results, text_of, unit

from zinf_compile.passes.schedule.insert_releases import insert_releases
from zinf_compile.passes.verify import verify

BEFORE = """
v = wait(g)
t = t(v)
a = mm(x, t)
b = relu(a)
"""
AFTER = """
v = wait(g)
t = t(v)
a = mm(x, t)
release(v)
b = relu(a)
"""
GATHERED = "g = all_gather(w); v = wait(g); "


def released(text: str, **inputs: torch.Tensor) -> list[str]:
    """Run the pass on a graph whose parameter `w` is gathered as `v`; return what follows the wait."""
    gm = insert_releases(graph_of(GATHERED + text, **inputs))
    verify(gm)
    return text_of(gm).splitlines()[2:]


def test_docstring_example() -> None:
    assert released("; ".join(lines_of(BEFORE)[1:]), x=torch.empty(2, 3), w=unit(4, 3)) == lines_of(AFTER)[1:]
    assert example_of(insert_releases) == (lines_of(BEFORE), lines_of(AFTER))


def test_parts_of_a_multi_output_view_hold_the_unit() -> None:
    assert released("s = split(v, 2); p = s[0]; q = s[1]; a = relu(p); b = relu(q); c = relu(b)", w=unit(4, 3))[-3:] == [
        "b = relu(q)",
        "release(v)",
        "c = relu(b)",
    ]


def test_views_that_the_schema_hides_hold_the_unit() -> None:
    assert released("u = _unsafe_view(v, [12]); a = relu(x); b = mul(a, u)", x=torch.empty(12), w=unit(4, 3))[-2:] == [
        "b = mul(a, u)",
        "release(v)",
    ]
    assert released("s = unsafe_split(v, 2); a = relu(x); p = s[0]; b = mul(a, p)", x=torch.empty(3), w=unit(4, 3))[-2:] == [
        "b = mul(a, p)",
        "release(v)",
    ]


def test_a_cast_lets_go_of_the_unit() -> None:
    text = "c = _to_copy(v, dtype=torch.bfloat16); a = relu(c); b = relu(a)"
    assert released(text, w=unit(4, 3))[:2] == ["c = _to_copy(v, dtype=torch.bfloat16)", "release(v)"]


def test_a_view_made_but_never_read_is_inside_too() -> None:
    assert released("a = relu(v); t = t(v); b = relu(a)", w=unit(4, 3)) == [
        "a = relu(v)",
        "t = t(v)",
        "release(v)",
        "b = relu(a)",
    ]


def test_a_unit_nobody_reads_is_released_at_once() -> None:
    assert released("a = relu(x)", x=torch.empty(3), w=unit(4, 3)) == ["release(v)", "a = relu(x)"]


def test_views_that_leave_the_graph_leave_as_copies() -> None:
    assert released("t = t(v); a = relu(t); s = select(v, 0, 0); return (t, a, s, t)", w=unit(4, 3)) == [
        "t = t(v)",
        "a = relu(t)",
        "s = select(v, 0, 0)",
        "clone = clone(t)",
        "clone_1 = clone(s)",
        "release(v)",
        "return (clone, a, clone_1, clone)",
    ]


def test_without_units_nothing_changes() -> None:
    text = "a = relu(x)\nt = t(a)\nreturn (t,)\n"
    assert text_of(insert_releases(graph_of(text, x=torch.empty(2, 3)))) == text


def test_numbers_stay() -> None:
    gm = graph_of(GATHERED + "t = t(v); a = mm(x, t); return (a, t)", x=torch.empty(2, 3), w=unit(4, 3))
    before = results(gm)
    torch.testing.assert_close(results(insert_releases(gm)), before, rtol=0, atol=0)
