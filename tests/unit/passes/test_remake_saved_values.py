from __future__ import annotations

import pytest
import torch
from irtext import example_of, graph_of, lines_of, results, text_of, unit
from torch import fx

from zinf_compile.errors import IllegalGraphError
from zinf_compile.ir import ops
from zinf_compile.passes.activations.carry_values import carry_values
from zinf_compile.passes.activations.drop_saved_values import drop_saved_values
from zinf_compile.passes.activations.remake_saved_values import remake_saved_values
from zinf_compile.passes.analysis.compute_graph import ComputeGraph
from zinf_compile.passes.analysis.compute_memory import account_compute
from zinf_compile.passes.analysis.repeatable import ForwardCompute, random_devices
from zinf_compile.passes.analysis.summary import summarize
from zinf_compile.passes.analysis.traffic import measure_traffic
from zinf_compile.passes.graph.remade import Remade, RemadeBlock, mark_remade
from zinf_compile.passes.lower import lower
from zinf_compile.passes.verify import verify

X, W = torch.empty(4, 4), unit(4, 4)
FORWARD = """
g = all_gather(z); q = wait(g); h = all_gather(w); v = wait(h); m = addmm(q, x, v); r = relu(m); release(q); release(v)
k = all_gather(u); f = wait(k); n = mm(r, f); release(f); return (n, r)
"""
BACKWARD = """
g = all_gather(u); f = wait(g); a = mm(x, f); release(f)
h = all_gather(w); v = wait(h); b = mul(a, r); c = mm(b, v); release(v); return (c,)
"""


def marked(forward: fx.GraphModule, backward: fx.GraphModule, states: dict[str, dict[str, str]]) -> None:
    """Say that the first compute of the forward runs again."""
    compute = ForwardCompute(forward.graph)
    block = RemadeBlock(compute=(tuple(compute.nodes[0]),), dropped=("r",))
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    carried = {node.name: node.name for node in inputs}
    mark_remade(forward, backward, Remade(forward=forward.graph, blocks=(block,), carried=carried, states=states))


def pair() -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward, of which `r` is dropped."""
    forward = graph_of(FORWARD, x=X, z=unit(4), w=W, u=W)
    backward = graph_of(BACKWARD, x=X, z=unit(4), w=W, u=W, r=X)
    marked(forward, backward, {})
    return forward, backward


def test_docstring_example_of_what_runs_again() -> None:
    _, backward = pair()
    before, after = example_of(remake_saved_values)
    assert before == lines_of(BACKWARD)
    found = verify(remake_saved_values(backward))
    assert text_of(found, gather="k", full="q", m_again="m", r_again="p").splitlines() == after


def test_docstring_example_of_what_is_dropped() -> None:
    before, after = example_of(drop_saved_values)
    text = "\n".join(before[1:]).replace("return (c, s, x, r)", "return (c, x, r)")
    forward = graph_of(text, x=X, w=W, u=W, z=W)
    with forward.graph.inserting_before(next(n for n in forward.graph.nodes if n.op == "call_function")):
        state = forward.graph.create_node("call_function", ops.random_state, ("cpu",), name="s")
        state.meta["val"] = torch.empty(5056, dtype=torch.uint8)
    c, x, r = forward.graph.output_node().args[0]
    forward.graph.output_node().args = ((c, state, x, r),)
    assert text_of(forward).splitlines() == before
    marked(forward, graph_of("return (r,)", r=X), {"d": {"cpu": "s"}})
    assert text_of(verify(drop_saved_values(forward)), r_dropped="t").splitlines() == after
    assert 'random_state("cpu")' in summarize(forward)


def test_docstring_example_of_what_is_carried_over() -> None:
    forward = graph_of("a = mm(x, w); b = relu(a); return (b, a)", x=X, w=W)
    backward = graph_of("c = mul(a, g); return (c,)", a=X, g=X)
    carried, states = carry_values(forward, backward=backward, own_outputs=1, values=["w"], copies=["x"], devices=["cpu"])
    assert text_of(forward, random="s", x_copy="k").splitlines() == [
        's = random_state("cpu")',
        "a = mm(x, w)",
        "b = relu(a)",
        "k = copy_value(x)",
        "return (b, s, w, k, a)",
    ]
    assert (carried, states) == ({"w": "w", "x": "x_copy"}, ["random"])
    assert [node.name for node in backward.graph.nodes if node.op == "placeholder"] == ["random", "w", "x_copy", "a", "g"]


def test_a_value_that_the_partitioner_computes_again_is_another() -> None:
    forward = graph_of("a = mm(x, w); b = relu(a); return (b, x)", x=X, w=W)
    backward = graph_of("a = mm(x, g); return (a,)", x=X, g=X)
    carry_values(forward, backward=backward, own_outputs=1, values=["a"])
    assert [(node.op, node.name) for node in backward.graph.nodes][:2] == [("placeholder", "a"), ("placeholder", "x")]
    assert text_of(backward) == "a_1 = mm(x, g)\nreturn (a_1,)\n"


def test_a_value_has_its_name_where_the_backward_has_dropped_one_of_that_name() -> None:
    forward = graph_of("a = mm(x, w); b = relu(a); return (b, x)", x=X, w=W)
    backward = graph_of("a = mm(x, g); c = relu(g); return (c,)", x=X, g=X)
    backward.graph.eliminate_dead_code()
    carried, _ = carry_values(forward, backward=backward, own_outputs=1, values=["a"])
    assert carried == {"a": "a"}
    assert [node.name for node in backward.graph.nodes if node.op == "placeholder"] == ["a", "x", "g"]


def test_names_of_what_is_carried_over_stay_apart_from_those_of_what_is_computed_again() -> None:
    forward = graph_of("a = mm(x, w); a_1 = relu(a); b = relu(a_1); return (b, x)", x=X, w=W)
    backward = graph_of("a = mm(x, g); return (a,)", x=X, g=X)
    carry_values(forward, backward=backward, own_outputs=1, values=["a", "a_1"])
    names = [node.name for node in backward.graph.nodes]
    assert names[:2] == ["a", "a_1"]
    assert len(set(names)) == len(names)


def test_numbers_traffic_and_memory() -> None:
    forward, backward = pair()
    drop_saved_values(forward)
    plain = graph_of(BACKWARD, x=X, z=unit(4), w=W, u=W, r=X)
    before = measure_traffic(plain.graph, world_size=2).gathered
    remake_saved_values(backward)
    assert measure_traffic(backward.graph, world_size=2).gathered == before + 8, "the bias besides"
    cpu = torch.device("cpu")
    ahead = account_compute(ComputeGraph(forward.graph, cpu, by_operator=True), results=1)
    saved = ahead.memory()
    assert (saved.saved, saved.results) == (64, 64), "nothing but the result"
    peak = account_compute(ComputeGraph(backward.graph, cpu, by_operator=True), forward=ahead.handed).memory()
    assert peak.activations + peak.temporaries > 0
    program = lower(backward, name="backward", compile_region=lambda region: region.forward)
    assert [step.name for step in program.steps if hasattr(step, "fn")] == ["", " again", ""]
    inputs = results(backward)
    assert len(inputs) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d = drop_value(a); e = relu(d); return (e,)", "e reads d, which may only leave the graph"),
        ("d = copy_value(a); e = relu(d); return (e,)", "e reads d, which may only leave the graph"),
        ('d = set_random_state(s, "cpu"); e = relu(a); return (e,)', "nothing sets back the one before"),
        ('d = set_random_state(s, "cpu"); e = set_random_state(s, "cpu"); return (a,)', "e sets another state than d"),
        ('d = set_random_state(s, "cpu"); b = relu(a); e = set_random_state(d, "cpu"); return (b,)', "b runs while the state"),
    ],
)
def test_what_verify_refuses(text: str, message: str) -> None:
    with pytest.raises(IllegalGraphError, match=message):
        verify(graph_of(f"a = relu(x); {text}", x=X, s=torch.get_rng_state()))


def test_a_dropped_value_may_not_be_read() -> None:
    _, backward = pair()
    with pytest.raises(IllegalGraphError, match="b reads r, which the forward has dropped"):
        verify(backward)


@pytest.mark.parametrize(
    ("text", "repeatable"),
    [
        ("g = all_gather(w); v = wait(g); a = mm(x, v); release(v); return (a,)", True),
        ("g = all_gather(w); v = wait(g); a = mm(x, v); b = addmm(a, x, x); release(v); return (b,)", False),
        ("g = all_gather(w); v = wait(g); a = mm(x, v); b = relu_(a); release(v); return (b,)", False),
    ],
)
def test_what_gives_the_same_a_second_time(text: str, repeatable: bool) -> None:
    (found,) = ForwardCompute(graph_of(text, x=X, w=W).graph).describe()
    assert (found.unit, found.repeatable) == ("w", repeatable)


def test_devices_of_random_numbers() -> None:
    gm = graph_of("a = relu(x); b = rand_like(a); return (b,)", x=X)
    nodes = list(gm.graph.nodes)
    assert random_devices(nodes[:2]) == ("", ())
    assert random_devices(nodes) == ("b", ("cpu",))
