from __future__ import annotations

import torch
from irtext import example_of, graph_of, lines_of, results, text_of, unit

from zinf_compile.passes.schedule.sink_unit_views import sink_unit_views

BEFORE = """
t = t(w)
a = relu(x)
b = mm(a, t)
c = mm(b, t)
"""
AFTER = """
a = relu(x)
t_1 = t(w)
b = mm(a, t_1)
t_2 = t(w)
c = mm(b, t_2)
"""


def test_docstring_example() -> None:
    gm = sink_unit_views(graph_of(BEFORE, x=torch.empty(2, 4), w=unit(4, 4)))
    assert text_of(gm) == AFTER.lstrip()
    assert example_of(sink_unit_views) == (lines_of(BEFORE), lines_of(AFTER))


def test_a_chain_of_views_moves_whole_and_in_order() -> None:
    gm = graph_of("s = split(w, 2); p = s[1]; c = _to_copy(p, dtype=torch.bfloat16); a = relu(x); b = mul(a, c)",
                  x=torch.empty(2, 3), w=unit(4, 3))  # fmt: skip
    assert text_of(sink_unit_views(gm)) == (
        "a = relu(x)\nsplit = split(w, 2)\ngetitem = split[1]\nc_1 = _to_copy(getitem, dtype=torch.bfloat16)\nb = mul(a, c_1)\n"
    ).replace("split = ", "s_1 = ").replace("split[", "s_1[").replace("getitem", "p_1")


def test_parts_of_one_parameter_sink_to_their_own_consumers() -> None:
    gm = graph_of("u = unbind(w); p = u[0]; q = u[1]; a = relu(p); b = relu(q)", w=unit(2, 3))
    assert text_of(sink_unit_views(gm)) == (
        "u_1 = unbind(w)\np_1 = u_1[0]\na = relu(p_1)\nu_2 = unbind(w)\nq_1 = u_2[1]\nb = relu(q_1)\n"
    )


def test_views_with_computed_sizes_stay_behind_the_size() -> None:
    gm = graph_of("n = sym_size(x, 0); p = slice(w, 0, 0, n); a = add(x, p)", x=torch.empty(2, 3), w=unit(4, 3))
    assert text_of(sink_unit_views(gm)) == "n = sym_size(x, 0)\np_1 = slice(w, 0, 0, n)\na = add(x, p_1)\n"


def test_a_view_that_leaves_the_graph_is_taken_last() -> None:
    gm = graph_of("t = t(w); a = relu(x); return (t, a)", x=torch.empty(3), w=unit(4, 3))
    assert text_of(sink_unit_views(gm)) == "a = relu(x)\nt_1 = t(w)\nreturn (t_1, a)\n"


def test_views_of_activations_and_copies_of_parameters_stay() -> None:
    text = "t = t(x)\nc = clone(w)\na = relu(x)\nb = mm(a, t)\nd = mul(b, c)\n"
    assert text_of(sink_unit_views(graph_of(text, x=torch.empty(4, 4), w=unit(4, 4)))) == text


def test_a_view_nobody_needs_goes() -> None:
    assert text_of(sink_unit_views(graph_of("t = t(w); a = relu(x)", x=torch.empty(3), w=unit(4, 3)))) == "a = relu(x)\n"


def test_numbers_stay() -> None:
    gm = graph_of("t = t(w); e = expand(t, [4, 4]); a = mm(x, t); b = mm(a, e); return (a, b)",
                  x=torch.empty(2, 4), w=unit(4, 4))  # fmt: skip
    before = results(gm)
    torch.testing.assert_close(results(sink_unit_views(gm)), before, rtol=0, atol=0)
