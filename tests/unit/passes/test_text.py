from __future__ import annotations

import dataclasses

import torch
from irtext import graph_of, unit
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile.passes.analysis.print_graph import graph_text
from zinf_compile.passes.graph.node_facts import mark_slot, slot_of

TEXT = """\
g = all_gather(w)
h = all_gather(u, 3)
k = all_gather(u, dtype=torch.bfloat16)
l = all_gather(w, 4, dtype=torch.float16)
v = wait(g)
f = wait(h)
s = split(v, 2, dim=1)
p = s[0]
a = expand(p, [4, 2])
c = _to_copy(f, dtype=torch.bfloat16)
release(v)
release(f)
r = reduce_scatter(a, w)
q = reduce_scatter(a, u, 0)
m = swap_in(w, "nvme", "host", 3)
n = swap_in(m, "host", "device")
o = swap_out(r, "device", "nvme")
j = gather_rows(w, i, "host")
return (a, None, [c], 2)
"""


def test_what_is_built_from_text_prints_as_that_text() -> None:
    assert graph_text(graph_of(TEXT, w=unit(4, 4), u=unit(4, 4), i=torch.zeros(3, dtype=torch.int64))) == TEXT


def test_sizes_stand_behind_transfers_only() -> None:
    gm = graph_of("g = all_gather(w, 0); v = wait(g); a = relu(v); release(v); return (a,)", w=unit(30, 40))
    assert graph_text(gm, sizes=True) == (
        f"{'g = all_gather(w, 0)':<60}  # w 4,800 B\n"
        f"{'v = wait(g)':<60}  # w 4,800 B\n"
        "a = relu(v)\n"
        f"{'release(v)':<60}  # w 4,800 B\n"
        "return (a,)\n"
    )


def test_sizes_are_those_of_what_travels() -> None:
    gm = graph_of("g = all_gather(w, 0, dtype=torch.bfloat16); v = wait(g); release(v); r = reduce_scatter(w, w)", w=unit(30, 40))
    assert [line.split("# ")[1] for line in graph_text(gm, sizes=True).splitlines()[:-1]] == [
        *(["w 2,400 B"] * 3),
        "w 4,800 B",
    ]


def test_a_swap_shows_the_bytes_of_one_ranks_shard() -> None:
    text = 's = swap_in(w, "nvme", "device"); g = all_gather(s); r = reduce_scatter(x, w); o = swap_out(r, "device", "nvme")'
    gm = graph_of(text, w=unit(5, 7), x=torch.empty(5, 7))
    for world_size, shard in ((1, 140), (2, 72), (4, 36)):
        shown = [line.split("# ")[1] for line in graph_text(gm, sizes=True, world_size=world_size).splitlines()[:-1]]
        assert shown == [f"w {shard} B", "w 140 B", "w 140 B", f"w {shard} B"]


def test_rows_show_the_bytes_of_as_many_as_are_named() -> None:
    shown = [
        graph_text(graph_of("r = gather_rows(w, i)", w=unit(30, 40), i=torch.zeros(count, dtype=torch.int64)), sizes=True)
        for count in (5, 31)
    ]
    assert [text.splitlines()[0].split("# ")[1] for text in shown] == ["w up to 800 of 4,800 B", "w up to 4,800 of 4,800 B"]


def test_what_the_partitioner_is_told_stands_behind_operators() -> None:
    gm = graph_of("t = t(w); a = relu(t); return (a,)", w=unit(3, 4))
    next(node for node in gm.graph.nodes if node.name == "t").meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert graph_text(gm, policies=True) == f"{'t = t(w)':<60}  # must_recompute\na = relu(t)\nreturn (a,)\n"
    assert "must" not in graph_text(gm)


def test_parameters_print_by_the_users_name() -> None:
    gm = graph_of("a = relu(primals_1)", primals_1=unit(3))
    node = next(iter(gm.graph.nodes))
    slot = slot_of(node)
    assert slot is not None
    mark_slot(node, dataclasses.replace(slot, name="block.0.bias"))
    assert graph_text(gm) == "a = relu(block.0.bias)\nreturn ()\n"


def test_constants_and_python_functions_print_by_name() -> None:
    graph = fx.Graph()
    constant = graph.get_attr("mask", torch.Tensor)
    graph.output((graph.call_function(torch.clone, (constant,)), graph.call_method("detach", (constant,))))
    root = nn.Module()
    root.register_buffer("mask", torch.ones(2))
    assert graph_text(fx.GraphModule(root, graph)) == (
        "mask = self.mask\nclone = clone(mask)\ndetach = detach(mask)\nreturn (clone, detach)\n"
    )
