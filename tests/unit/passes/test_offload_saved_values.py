from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from irtext import example_of, graph_of, lines_of, results, text_of, unit
from torch import fx, nn
from tracing import traced

from zinf_compile.errors import IllegalGraphError
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier, Topology
from zinf_compile.passes import graph_passes, run_passes
from zinf_compile.passes.activations.fetch_saved_values import fetch_saved_values
from zinf_compile.passes.activations.offload_saved_values import offload_saved_values
from zinf_compile.passes.analysis.saved_memories import find_memories
from zinf_compile.passes.analysis.traffic import measure_traffic
from zinf_compile.passes.graph.node_facts import mark_moving
from zinf_compile.passes.verify import verify
from zinf_compile.plan.saved_homes import choose_homes

INPUTS = {"x": torch.empty(4, 4), "w": unit(4, 4), "u": unit(4, 4), "z": unit(4, 4)}
BACKWARD_INPUTS = {"r": torch.empty(4, 4), "t": torch.empty(4, 4).t(), "x": torch.empty(4, 4), "w": unit(4, 4), "u": unit(4, 4)}
APART, HERE = Topology(host_apart=True), Topology(host_apart=False)

FORWARD = """
g = all_gather(w); v = wait(g); a = mm(x, v); r = relu(a); t = t(r); release(v)
h = all_gather(u); f = wait(h); b = mm(r, f); release(f)
k = all_gather(z); q = wait(k); c = mm(b, q); release(q); return (c, r, t)
"""
BACKWARD = """
g = all_gather(w); v = wait(g); a = mm(x, v); release(v)
h = all_gather(u); f = wait(h); b = mm(a, f); c = mul(b, r); d = sin(t); release(f); return (c, d)
"""


def graphs(topology: Topology, tier: Tier) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward with `r` and its view marked for a tier."""
    forward, backward = graph_of(FORWARD, **INPUTS), graph_of(BACKWARD, **BACKWARD_INPUTS)
    found = find_memories(forward.graph, backward.graph, own_outputs=1)
    mark_moving(forward, backward, choose_homes(found, tier, topology, least_bytes=64))
    return forward, backward


def moved(topology: Topology, tier: Tier) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = graphs(topology, tier)
    return verify(offload_saved_values(forward, hops=topology.hops)), verify(fetch_saved_values(backward, hops=topology.hops))


def test_what_is_saved_is_found_once_for_all_views() -> None:
    (found,) = find_memories(graph_of(FORWARD, **INPUTS).graph, graph_of(BACKWARD, **BACKWARD_INPUTS).graph, own_outputs=1)
    assert found == SavedMemory(name="r", outputs=(1, 2), inputs=("r", "t"), bytes=64)


def test_docstring_examples() -> None:
    forward, backward = moved(APART, Tier.HOST)
    before, after = example_of(offload_saved_values)
    assert before == lines_of(FORWARD)
    assert text_of(forward, offloaded="o", r_saved="s", t_saved="p").splitlines() == after
    before, after = example_of(fetch_saved_values)
    assert before == lines_of(BACKWARD)
    assert text_of(backward, copied="s", r_back="p", t_back="q").splitlines() == after


def test_each_hop_has_a_stretch_of_compute_to_itself() -> None:
    forward, backward = moved(APART, Tier.NVME)
    kinds = [
        node.name for node in forward.graph.nodes if node.name in ("r", "b", "c") or "saved" in node.name or "off" in node.name
    ]
    assert kinds == ["r", "b", "offloaded", "c", "offloaded_1", "r_saved", "t_saved"]
    kinds = [node.name for node in backward.graph.nodes if node.name in ("a", "b", "read", "copied", "r_back", "t_back")]
    assert kinds == ["read", "copied", "a", "r_back", "t_back", "b"]
    for graph, way in ((forward, "out"), (backward, "in")):
        traffic = measure_traffic(graph.graph, world_size=2)
        assert (traffic.written, traffic.copied_out) == ((64, 64) if way == "out" else (0, 0))
        assert (traffic.read, traffic.copied_in) == ((64, 64) if way == "in" else (0, 0))


def stretches(first: str, last: str) -> str:
    """Return four products that are stretches of their own, with more in the first and the last one."""
    more = {0: first, 3: last}
    rows = [
        f"g{n} = all_gather({w}); f{n} = wait(g{n}); {more.get(n, '')} "
        f"e{n} = mm({f'e{n - 1}' if n else 'x'}, f{n}); release(f{n})"
        for n, w in enumerate("abcd")
    ]
    return "; ".join(rows)


@pytest.mark.parametrize("beside", [1, 2, 3])
def test_a_memory_is_on_its_way_beside_as_many_stretches_as_it_says(beside: int) -> None:
    given = {"x": torch.empty(4, 4), **{name: unit(4, 4) for name in "abcd"}}
    forward = graph_of(f"{stretches('r = relu(x);', '')}; return (e3, r)", **given)
    backward = graph_of(f"{stretches('', 'y = sin(r);')}; return (e3, y)", r=torch.empty(4, 4), **given)
    (found,) = find_memories(forward.graph, backward.graph, own_outputs=1)
    mark_moving(forward, backward, (dataclasses.replace(found, tier=Tier.HOST, lag=beside, lead=beside),))
    names = [node.name for node in verify(offload_saved_values(forward, hops=APART.hops)).graph.nodes]
    between = names[names.index("offloaded") : names.index("r_saved")]
    assert [name for name in between if name.startswith("e")] == ["e1", "e2", "e3"][:beside]
    names = [node.name for node in verify(fetch_saved_values(backward, hops=APART.hops)).graph.nodes]
    between = names[names.index("copied") : names.index("r_back")]
    assert [name for name in between if name.startswith("e")] == ["e0", "e1", "e2"][3 - beside :]


@pytest.mark.parametrize(("topology", "tier"), [(HERE, Tier.HOST), (HERE, Tier.DEVICE), (APART, Tier.DEVICE)])
def test_what_stays_in_the_memory_of_the_device_changes_nothing(topology: Topology, tier: Tier) -> None:
    forward, backward = moved(topology, tier)
    assert text_of(forward) == text_of(graph_of(FORWARD, **INPUTS))
    assert text_of(backward) == text_of(graph_of(BACKWARD, **BACKWARD_INPUTS))


def test_what_the_user_has_anyway_stays() -> None:
    forward = graph_of(
        "a = relu(x); b = t(a); c = sin(a); d = split(x, 2); e = d[0]; return (b, a, c, x, e)", x=torch.empty(4, 4)
    )
    names = {"a": torch.empty(4, 4), "c": torch.empty(4, 4), "x": torch.empty(4, 4), "e": torch.empty(2, 4)}
    backward = graph_of("s = mul(a, c); return (s,)", **names)
    assert [memory.name for memory in find_memories(forward.graph, backward.graph, own_outputs=1)] == ["c"]


def test_a_memory_that_is_still_written_leaves_behind_the_last_write() -> None:
    text = """
    m = sin(e); p = slice(m, 0, 0, 2)
    g = all_gather(w); v = wait(g); a = mm(x, v); release(v)
    h = all_gather(u); f = wait(h); s = sin(a); q = copy_(p, f); release(f)
    k = all_gather(z); y = wait(k); c = mm(a, y); release(y); return (c, m)
    """
    given = {**INPUTS, "x": torch.empty(2, 4), "u": unit(2, 4), "e": torch.empty(4, 4)}
    forward = graph_of(text, **given)
    mark_moving(forward, forward, (SavedMemory(name="m", outputs=(1,), inputs=("m",), bytes=64, tier=Tier.HOST),))
    names = [node.name for node in offload_saved_values(forward, hops=APART.hops).graph.nodes]
    assert names.index("q") < names.index("offloaded") < names.index("c") < names.index("m_saved")


@pytest.mark.parametrize(("topology", "tier"), [(HERE, Tier.NVME), (APART, Tier.HOST), (APART, Tier.NVME)])
def test_numbers_and_strides_stay(topology: Topology, tier: Tier) -> None:
    for before, after in zip(graphs(topology, tier), moved(topology, tier), strict=True):
        for expected, found in zip(results(before), results(after), strict=True):
            assert torch.equal(expected, found)
            assert expected.stride() == found.stride()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('o = swap_values_out([a], "host", "device"); s = wait_value(o, 0); return (s,)', "no further from the device"),
        ('o = swap_values_out([a], "host", "nvme"); s = wait_value(o, 0); return (s,)', "made on the device"),
        ('o = swap_values_out([a], "device", "host"); s = wait_value(o, 0); b = sin(s); return (b,)', "a stand-in"),
        ('o = swap_values_out([a], "device", "host"); return (a,)', "must be used by swaps and waits"),
        ('o = swap_values_out([x], "device", "host"); s = wait_value(o, 0); return (s,)', "not a value that compute has made"),
        ('o = swap_values_in([a], "host", "device"); s = wait_value(o, 0); return (s,)', "not a saved value"),
        ('o = swap_values_in([x], "nvme", "host"); s = wait_value(o, 0); return (s,)', "not on the device"),
        (
            'o = swap_values_out([a], "device", "host"); b = relu_(a); s = wait_value(o, 0); return (s,)',
            "after offloaded|after o ",
        ),
    ],
)
def test_the_verifier_refuses(broken: str, message: str) -> None:
    with pytest.raises(IllegalGraphError, match=message):
        verify(graph_of(f"a = relu(x); {broken}", x=torch.empty(4, 4)))


def test_an_operator_that_writes_elsewhere_may_read_what_leaves() -> None:
    text = 'a = relu(x); b = sin(x); o = swap_values_out([a], "device", "host"); c = add_(b, a)'
    verify(graph_of(f"{text}; s = wait_value(o, 0); return (c, s)", x=torch.empty(4, 4)))


def test_other_results_of_an_operator_may_change_while_one_leaves() -> None:
    text = """
    n = native_layer_norm(x, [4], None, None, 1e-5); a = n[0]; r = n[2]; v = view(a, [16])
    o = swap_values_out([r], "device", "host"); b = relu_(v); s = wait_value(o, 0); return (b, s)
    """
    verify(graph_of(text, x=torch.empty(4, 4)))
    for other in (text, text.replace("view(a", "view(c").replace("v =", "c = n[0]; v ="), text.replace("a = n[0]", "a = n[-3]")):
        with pytest.raises(IllegalGraphError, match="b writes to v after o began to move it"):
            verify(graph_of(other.replace("[r]", "[a]"), x=torch.empty(4, 4)))


def test_what_leaves_may_not_become_memory_of_another_tensor() -> None:
    text = 'a = relu(x); b = sin(x); o = swap_values_out([a], "device", "host"); c = add_(b, a); s = wait_value(o, 0)'
    gm = graph_of(f"{text}; return (c, s)", x=torch.empty(4, 4))
    next(node for node in gm.graph.nodes if node.name == "c").target = torch.ops.aten.set_.source_Tensor
    with pytest.raises(IllegalGraphError, match="c writes to a after o began to move it"):
        verify(gm)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)).t().contiguous()
        return x.sum()


@pytest.mark.parametrize(("topology", "tier"), [(HERE, Tier.NVME), (APART, Tier.NVME)])
def test_the_whole_pipeline_is_legal_after_each_pass(topology: Topology, tier: Tier) -> None:
    found = traced(_Model(), torch.randn(8, 8))
    forward, backward = found["forward"], found["backward"]
    memories = find_memories(forward.graph, backward.graph, own_outputs=1)
    assert memories
    mark_moving(forward, backward, choose_homes(memories, tier, topology, least_bytes=1))
    for gm, op in ((forward, "swap_values_out"), (backward, "swap_values_in")):
        run_passes(gm, graph_passes(bucket_bytes=64, hops=topology.hops), verify_each=True)
        verify(gm)
        swaps = [node for node in gm.graph.nodes if str(node.target).split(".")[1:2] == [op]]
        assert len(swaps) == len(memories) * len(list(pairwise(topology.hops(tier))))
