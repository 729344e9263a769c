from __future__ import annotations

import torch
from irtext import example_of, graph_of, lines_of, text_of, unit

from zinf_compile.passes import ordinary_passes, region_passes, run_passes
from zinf_compile.passes.graph.node_facts import starts_region
from zinf_compile.passes.schedule.drop_gathers import drop_gathers

BEFORE = """
g = all_gather(w)
v = wait(g)
t = t(v)
a = mm(x, t)
"""
AFTER = """
t = t(w)
a = mm(x, t)
"""


def test_docstring_example() -> None:
    gm = drop_gathers(graph_of("; ".join(lines_of(BEFORE)), x=torch.empty(2, 3), w=unit(4, 3)))
    assert text_of(gm).splitlines() == lines_of(AFTER)
    assert example_of(drop_gathers) == (lines_of(BEFORE), lines_of(AFTER))


def test_regions_are_those_of_a_graph_with_gathers() -> None:
    """A unit that is gathered twice, and views and casts of another one."""
    text = "a = mm(x, w); t = t(v); b = mm(a, t); d = mm(b, u); c = _to_copy(v, dtype=torch.float64); e = mm(d, w); f = relu(c)"
    inputs = {"x": torch.empty(3, 3), "w": unit(3, 3), "v": unit(3, 3), "u": unit(3, 3)}
    firsts = []
    for passes in (ordinary_passes(bucket_bytes=1), region_passes(bucket_bytes=1)):
        gm = run_passes(graph_of(text, **inputs), passes)
        firsts.append([node.name for node in gm.graph.nodes if starts_region(node)])
    assert firsts[0] == firsts[1]
    assert len(firsts[0]) > 2
