"""Units that a forward keeps gathered for its backward: both passes, and which units may be kept."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from irtext import example_of, graph_of, lines_of, results, text_of, unit
from torch import fx

from zinf_compile.errors import IllegalGraphError
from zinf_compile.passes.analysis.compute_graph import ComputeGraph
from zinf_compile.passes.analysis.compute_memory import account_compute
from zinf_compile.passes.analysis.keepable_units import find_keepable
from zinf_compile.passes.analysis.memory_needs import measure_needs
from zinf_compile.passes.analysis.traffic import measure_traffic
from zinf_compile.passes.graph.node_facts import kept_units, mark_kept
from zinf_compile.passes.lower import lower
from zinf_compile.passes.schedule.insert_gathers import insert_gathers
from zinf_compile.passes.schedule.insert_releases import insert_releases
from zinf_compile.passes.schedule.keep_for_backward import keep_for_backward
from zinf_compile.passes.schedule.narrow_gathers import narrow_gathers
from zinf_compile.passes.schedule.read_kept_units import read_kept_units
from zinf_compile.passes.verify import verify

X, W = torch.empty(4, 4), unit(4, 4)
FORWARD = "t = t(w); a = mm(x, t); return (a, x, w)"
BACKWARD = "b = mm(g, w); r = reduce_scatter(b, w); return (r,)"


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def kept(forward: str, backward: str, **inputs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Keep all that may be kept, between graphs of which the first has one output for the user."""
    ahead, back = graph_of(forward, **inputs), graph_of(backward, **inputs)
    units = find_keepable(ahead.graph, back.graph)
    return keep_for_backward(ahead, backward=back, own_outputs=1, units=units), back


def scheduled(gm: fx.GraphModule) -> fx.GraphModule:
    """Gather just in time."""
    return insert_releases(narrow_gathers(insert_gathers(gm, keep_bytes=1 << 20)))


def test_docstring_example_of_what_is_kept() -> None:
    forward, backward = kept(FORWARD, BACKWARD, x=X, g=X, w=W)
    before, after = example_of(keep_for_backward)
    assert re.sub(" +", " ", "; ".join(before)) == f"forward: {FORWARD}; backward: {BACKWARD}"
    found = f"forward: {'; '.join(text_of(forward).splitlines())}; backward: {'; '.join(text_of(backward).splitlines())}"
    assert re.sub(" +", " ", "; ".join(after)) == found
    assert text_of(backward) == text_of(graph_of(BACKWARD, x=X, g=X, w=W)), "it gathers until `read_kept_units`"
    assert placeholders(backward)[0].name == "kept"
    assert kept_units(backward.graph) == {"w": placeholders(backward)[0]}


def test_docstring_example_of_what_is_read() -> None:
    before, after = example_of(read_kept_units)
    gm = graph_of("\n".join(before), x=X, w=W, k=X)
    by_name = {node.name: node for node in placeholders(gm)}
    mark_kept(by_name["k"], by_name["w"])
    assert text_of(verify(read_kept_units(gm))).splitlines() == after


def test_the_forward_gathers_once_and_the_backward_not_at_all() -> None:
    forward, backward = kept(FORWARD, BACKWARD, x=X, g=X, w=W)
    ahead, back = verify(scheduled(forward)), verify(read_kept_units(scheduled(backward)))
    assert lines_of(text_of(ahead, gather="h", full="v"))[0:2] == ["h = all_gather(w)", "v = wait(h)"]
    traffic = [measure_traffic(gm.graph, world_size=2) for gm in (ahead, back)]
    assert [each.gathered for each in traffic] == [32, 0]
    assert measure_needs(back.graph).gathered == 0
    assert lower(ahead, name="forward").kept == {3}, "the register of the gather"
    assert lower(back, name="backward").kept == frozenset()
    assert all(map(torch.equal, results(ahead)[:1], results(graph_of(FORWARD, x=X, g=X, w=W))[:1]))


def test_a_kept_unit_is_memory_of_compute_until_its_last_use_in_the_backward() -> None:
    forward, backward = kept(FORWARD, BACKWARD, x=X, g=X, w=W)
    ahead, back = scheduled(forward), read_kept_units(scheduled(backward))
    cpu = torch.device("cpu")
    first = account_compute(ComputeGraph(ahead.graph, cpu, by_operator=True), results=1)
    plain = account_compute(ComputeGraph(scheduled(graph_of(FORWARD, x=X, w=W)).graph, cpu, by_operator=True), results=1)
    assert first.memory().saved == plain.memory().saved + 64
    second = account_compute(ComputeGraph(back.graph, cpu, by_operator=True), forward=first.handed).memory()
    without = account_compute(
        ComputeGraph(scheduled(graph_of(BACKWARD, g=X, w=W)).graph, cpu, by_operator=True), forward=plain.handed
    ).memory()
    assert second.activations == without.activations + 64


HALF = torch.empty(4, 4, dtype=torch.bfloat16)
NARROW = "c = _to_copy(w, dtype=torch.bfloat16); t = t(c); a = mm(h, t); return (a, h, w)"
NARROW_BACK = "c = _to_copy(w, dtype=torch.bfloat16); b = mm(h, c); r = reduce_scatter(g, w); return (b, r)"


def test_what_both_only_cast_is_kept_in_the_narrower_type() -> None:
    forward, backward = kept(NARROW, NARROW_BACK, h=HALF, g=X, w=W)
    ahead, back = verify(scheduled(forward)), verify(read_kept_units(scheduled(backward)))
    assert [measure_traffic(gm.graph, world_size=2).gathered for gm in (ahead, back)] == [16, 0]
    assert placeholders(back)[0].meta["val"].dtype == torch.bfloat16
    assert "b = mm(h, kept)" in text_of(back)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (NARROW, "b = mm(g, w); r = reduce_scatter(g, w); return (b, r)"),
        ("t = t(w); a = mm(g, t); return (a, w)", NARROW_BACK),
        (FORWARD, "r = reduce_scatter(g, w); return (r,)"),
        ("a = embedding(w, i); return (a, w)".replace("embedding(w, i)", "gather_rows(w, i)"), BACKWARD),
        ("return (x, w)", BACKWARD),
    ],
    ids=["cast in the forward", "cast in the backward", "not read in the backward", "rows", "not read in the forward"],
)
def test_what_cannot_be_kept(forward: str, backward: str) -> None:
    inputs = {"x": X, "g": X, "h": HALF, "w": W, "i": torch.zeros(2, dtype=torch.int64)}
    assert find_keepable(graph_of(forward, **inputs).graph, graph_of(backward, **inputs).graph) == ()


def test_units_come_in_the_order_of_their_last_use() -> None:
    forward = "a = mm(x, w); b = mm(a, u); c = mm(b, w); return (c, w, u)"
    backward = "b = mm(g, w); c = mm(b, u); r = reduce_scatter(b, w); s = reduce_scatter(c, u); return (r, s)"
    units = find_keepable(graph_of(forward, x=X, w=W, u=W).graph, graph_of(backward, g=X, w=W, u=W).graph)
    assert [unit.name for unit in units] == ["u", "w"]


def test_a_kept_unit_may_only_leave_the_graph() -> None:
    text = "h = all_gather(w); v = wait(h); k = keep_for_backward(v); a = mm(x, k); release(v); return (a,)"
    with pytest.raises(IllegalGraphError, match="a reads k, which may only leave the graph"):
        verify(graph_of(text, x=X, w=W))
