from __future__ import annotations

import pytest
import torch
from irtext import copied, example_of, graph_of, lines_of, results, text_of, unit
from torch import nn

from zinf_compile.passes.graph.node_facts import fake_value
from zinf_compile.passes.schedule.insert_releases import insert_releases
from zinf_compile.passes.schedule.narrow_gathers import narrow_gathers
from zinf_compile.passes.verify import peak_gathered_bytes, verify

X = torch.empty(4, 4, dtype=torch.bfloat16)
INPUTS = {"x": X, "y": torch.empty(4, 4), "w": unit(4, 4)}

BEFORE = """
g = all_gather(w)
v = wait(g)
c = _to_copy(v, dtype=torch.bfloat16)
t = t(c)
a = mm(x, t)
"""
AFTER = """
g = all_gather(w, dtype=torch.bfloat16)
v = wait(g)
t = t(v)
a = mm(x, t)
"""

START = "g = all_gather(w); v = wait(g); "
NARROW = "g = all_gather(w, dtype=torch.bfloat16); v = wait(g); "


def narrowed(text: str) -> list[str]:
    return text_of(narrow_gathers(graph_of(text, **INPUTS))).splitlines()


def test_docstring_example() -> None:
    gm = narrow_gathers(graph_of(BEFORE, x=X, w=unit(4, 4)))
    assert text_of(gm) == AFTER.lstrip()
    assert example_of(narrow_gathers) == (lines_of(BEFORE), lines_of(AFTER))


NARROWED = {
    "views on both sides": (
        "t = t(v); c = _to_copy(t, dtype=torch.bfloat16); s = view(c, [4, 4]); a = mm(x, s)",
        "t = t(v); s = view(t, [4, 4]); a = mm(x, s)",
    ),
    "two consumers with casts of their own": (
        "c = _to_copy(v, dtype=torch.bfloat16); b = mm(x, c); t = t(v); d = _to_copy(t, dtype=torch.bfloat16); a = mm(b, d)",
        "b = mm(x, v); t = t(v); a = mm(b, t)",
    ),
    "a cast back": (
        "c = _to_copy(v, dtype=torch.bfloat16); d = _to_copy(c, dtype=torch.float32); a = mm(y, d)",
        "d = _to_copy(v, dtype=torch.float32); a = mm(y, d)",
    ),
    "Inductor's cast": ("c = convert_element_type(v, torch.bfloat16); a = mm(x, c)", "a = mm(x, v)"),
    "the size of a view": (
        "t = t(v); n = sym_size(t, 0); c = _to_copy(t, dtype=torch.bfloat16); a = view(c, [n, 4])",
        "t = t(v); n = sym_size(t, 0); a = view(t, [n, 4])",
    ),
    "a reduced gradient": (
        "c = _to_copy(v, dtype=torch.bfloat16); a = mm(x, c); r = reduce_scatter(y, w)",
        "a = mm(x, v); r = reduce_scatter(y, w)",
    ),
    "the first rows": (
        "s = slice(v, 0, 0, 2); c = _to_copy(s, dtype=torch.bfloat16); a = mm(c, x)",
        "s = slice(v, 0, 0, 2); a = mm(s, x)",
    ),
    "columns, which lie apart": (
        "s = slice(v, 1, 0, 2); c = _to_copy(s, dtype=torch.bfloat16); a = mm(x, c)",
        "s = slice(v, 1, 0, 2); c = _to_copy(s, dtype=torch.bfloat16); a = mm(x, c)",
    ),
    "parts, of which the first starts the unit": (
        "s = split(v, 2); p = s[0]; c = _to_copy(p, dtype=torch.bfloat16); q = s[1]; d = _to_copy(q, dtype=torch.bfloat16); "
        "a = mul(c, d)",
        "s = split(v, 2); p = s[0]; q = s[1]; d = _to_copy(q, dtype=torch.bfloat16); a = mul(p, d)",
    ),
    "an expanded view": (
        "e = expand(v, [2, 4, 4]); c = _to_copy(e, dtype=torch.bfloat16); a = relu(c)",
        "e = expand(v, [2, 4, 4]); c = _to_copy(e, dtype=torch.bfloat16); a = relu(c)",
    ),
    "another order in memory": (
        "t = t(v); c = _to_copy(t, dtype=torch.bfloat16, memory_format=torch.contiguous_format); a = mm(x, c)",
        "t = t(v); c = _to_copy(t, dtype=torch.bfloat16, memory_format=torch.contiguous_format); a = mm(x, c)",
    ),
}
"""What stands behind the wait, before and after; `a` is made from all of it."""


@pytest.mark.parametrize("case", NARROWED)
def test_a_unit_used_through_casts_alone_travels_cast(case: str) -> None:
    before, after = NARROWED[case]
    assert narrowed(START + before) == lines_of(NARROW + after)


NEAR_MISSES = {
    "no cast": "a = mm(y, v)",
    "nothing at all": "a = mm(y, y)",
    "a use in full precision": "c = _to_copy(v, dtype=torch.bfloat16); a = mm(x, c); b = mm(y, v)",
    "a view in full precision": "t = t(v); c = _to_copy(t, dtype=torch.bfloat16); a = mm(x, c); b = mm(y, t)",
    "casts to two types": "c = _to_copy(v, dtype=torch.bfloat16); d = _to_copy(v, dtype=torch.float16); a = mm(x, c); b = neg(d)",
    "a wider type": "c = _to_copy(v, dtype=torch.float64); a = relu(c)",
    "a copy": "c = _to_copy(v); a = relu(c)",
    "an integer": "c = _to_copy(v, dtype=torch.int16); a = neg(c)",
    "a type that not every transport knows": "c = _to_copy(v, dtype=torch.float8_e4m3fn); a = view(c, [16])",
    "its own gradient": "c = _to_copy(v, dtype=torch.bfloat16); a = mm(x, c); r = reduce_scatter(v, w); return (r,)",
    "returned": "c = _to_copy(v, dtype=torch.bfloat16); t = t(v); return (c, t)",
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_other_units_stay_as_they_are(case: str) -> None:
    before = text_of(graph_of(START + NEAR_MISSES[case], **INPUTS))
    assert text_of(narrow_gathers(graph_of(START + NEAR_MISSES[case], **INPUTS))) == before


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.bfloat16])
def test_integers_and_units_that_are_narrow_already_stay(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=False)
    gm = graph_of(START + "c = _to_copy(v, dtype=torch.float16); a = relu(c)", w=parameter)
    before = text_of(gm)
    assert text_of(narrow_gathers(gm)) == before


def test_a_unit_whose_bits_are_read_stays() -> None:
    gm = graph_of(START + "i = alias(v); c = _to_copy(i, dtype=torch.bfloat16); a = relu(c)", **INPUTS)
    bits = next(node for node in gm.graph.nodes if node.name == "i")
    bits.target, bits.args = torch.ops.aten.view.dtype, (bits.args[0], torch.int32)
    bits.meta["val"] = fake_value(bits).view(torch.int32)
    before = text_of(gm)
    assert text_of(narrow_gathers(gm)) == before


def test_double_becomes_single() -> None:
    gm = graph_of(START + "c = _to_copy(v, dtype=torch.float32); a = relu(c)", w=unit(3, dtype=torch.float64))
    assert text_of(narrow_gathers(gm)).splitlines()[0] == "g = all_gather(w, dtype=torch.float32)"


def test_each_gather_of_a_unit_is_decided_by_itself() -> None:
    text = START + "a = mm(y, v); h = all_gather(w); u = wait(h); c = _to_copy(u, dtype=torch.bfloat16); b = mm(x, c)"
    assert narrowed(text)[:5] == [
        "g = all_gather(w)",
        "v = wait(g)",
        "a = mm(y, v)",
        "h = all_gather(w, dtype=torch.bfloat16)",
        "u = wait(h)",
    ]


def test_values_keep_their_types_shapes_and_strides() -> None:
    text = BEFORE.replace("c = ", "s = unsqueeze(v, 0); e = expand(v, [2, 4, 4]); d = _to_copy(e, dtype=torch.bfloat16)\nc = ")
    gm = narrow_gathers(graph_of(text + "b = relu(d); return (a, b)", x=X, w=unit(4, 4)))
    values = {node.name: fake_value(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert {value.dtype for value in values.values()} == {torch.bfloat16}
    assert values["e"].stride() == (0, 4, 1)
    assert values["d"].stride() == values["b"].stride() == (16, 4, 1)
    assert values["t"].stride() == (1, 4)


def test_a_cast_that_leaves_the_graph_is_cloned_there() -> None:
    gm = narrow_gathers(graph_of(START + "c = _to_copy(v, dtype=torch.bfloat16); return (c,)", **INPUTS))
    before = results(copied(gm))
    verify(insert_releases(gm))
    assert text_of(gm).splitlines()[1:] == ["v = wait(g)", "clone = clone(v)", "release(v)", "return (clone,)"]
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)


def test_half_the_bytes_are_held() -> None:
    gm = graph_of(BEFORE, x=X, w=unit(4, 4))
    assert peak_gathered_bytes(gm.graph) == (64, "g")
    assert peak_gathered_bytes(narrow_gathers(gm).graph) == (32, "g")


@pytest.mark.parametrize("case", NARROWED)
def test_numbers_stay(case: str) -> None:
    gm = graph_of(f"{START}{NARROWED[case][0]}; return (a,)", **INPUTS)
    before = results(copied(gm))
    verify(narrow_gathers(gm), complete=False)
    gm.graph.lint()
    torch.testing.assert_close(results(gm), before, rtol=0, atol=0)
