from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import networkx as nx
import pytest
import torch
from dot import parsed
from hypothesis import given
from hypothesis import strategies as st
from irtext import graph_of, unit
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zinf_compile.errors import IllegalGraphError
from zinf_compile.passes.analysis.traffic import measure_traffic
from zinf_compile.passes.analysis.transfer_graph import build_transfer_graph, find_critical_path, transfer_dot

LAYER = "g = all_gather(w); v = wait(g); t = t(v); a = mm(x, t); release(v); r = reduce_scatter(a, w)"


def transfers_of(text: str, world_size: int = 2, **inputs: torch.Tensor) -> nx.DiGraph:
    return build_transfer_graph(graph_of(text, **inputs).graph, world_size=world_size)


def edges_of(transfers: nx.DiGraph, kind: str) -> set[str]:
    return {f"{a} -> {b}" for a, b, found in transfers.edges.data("kind") if found == kind}


def bytes_of(transfers: nx.DiGraph) -> dict[str, int]:
    return dict(transfers.nodes.data("bytes"))


def test_docstring_example() -> None:
    transfers = transfers_of(LAYER, x=torch.empty(4, 4), w=unit(4, 4))
    shown = inspect.getdoc(build_transfer_graph) or ""
    assert LAYER.split("; ") == re.findall(r"graph: +(.*)", shown)[0].split(";  ")
    chains = [chain.split(" -> ") for chain in re.findall(r"edges: +(.*)", shown)[0].split(",  ")]
    assert list(transfers) == ["g", "v", "t", "release(v)", "r"]
    assert set(transfers.edges) == {edge for chain in chains for edge in itertools.pairwise(chain)}
    assert edges_of(transfers, "order") == {"t -> release(v)", "release(v) -> r"}


def test_bytes_are_what_moves_and_what_a_stretch_reads_and_leaves() -> None:
    transfers = transfers_of(LAYER, world_size=3, x=torch.empty(2, 5), w=unit(7, 5))
    moved = 2 * 12 * 4  # two peers' shards of ceil(35 / 3) elements
    assert bytes_of(transfers) == {"g": moved, "v": 0, "t": 4 * (7 * 5 + 2 * 5 + 2 * 7), "release(v)": 0, "r": moved}


def test_a_gather_in_a_narrower_type_moves_its_bytes() -> None:
    text = (
        LAYER.replace("all_gather(w)", "all_gather(w, dtype=torch.bfloat16)")
        .replace("mm(x, t)", "mm(z, t)")
        .replace("(a, w)", "(x, w)")
    )
    inputs = {"x": torch.empty(7, 5), "z": torch.empty(2, 5, dtype=torch.bfloat16), "w": unit(7, 5)}
    transfers = transfers_of(f"{text}; return (r, a)", world_size=3, **inputs)
    assert bytes_of(transfers) == {"g": 2 * 12 * 2, "v": 0, "t": 2 * (7 * 5 + 2 * 5 + 2 * 7), "release(v)": 0, "r": 2 * 12 * 4}


def test_rows_move_as_many_bytes_as_can_be_named() -> None:
    gm = graph_of('r = gather_rows(w, i, "nvme")', w=unit(30, 40), i=torch.zeros(5, dtype=torch.int64))
    traffic = measure_traffic(gm.graph, world_size=4)
    assert (traffic.gathered, traffic.read, traffic.units, traffic.live) == (5 * 160 * 3 // 4, 5 * 160, 1, 0)
    assert build_transfer_graph(gm.graph, world_size=4).nodes["r"] == {
        "lane": "gather", "bytes": 5 * 160 * 3 // 4, "label": "gather_rows w",
    }  # fmt: skip


def test_a_stretch_counts_each_memory_once_and_views_not_at_all() -> None:
    text = "a = mul(x, x); b = t(a); c = mm(b, x); d = view(c, [16]); v = wait(all_gather(w)); e = mul(d, b); f = t(e)"
    transfers = transfers_of(f"{text.replace('mul(d, b)', 'mm(c, b)')}; return (f,)", x=torch.empty(4, 4), w=unit(3))
    assert bytes_of(transfers)["a"] == 64 * 3  # x, and a and c, which are read later
    assert bytes_of(transfers)["e"] == 64 * 3  # a, c and e


def test_what_stays_inside_a_stretch_weighs_nothing() -> None:
    assert bytes_of(transfers_of("a = relu(x); b = relu(a); return (b,)", x=torch.empty(8))) == {"a": 64}


def test_names_of_hollow_parameters_and_sizes_weigh_nothing() -> None:
    transfers = transfers_of("s = sym_size(w, 0); a = relu(x); return (a,)", x=torch.empty(2), w=unit(100))
    assert bytes_of(transfers) == {"s": 16}


def test_sizes_known_at_run_time_only_weigh_nothing() -> None:
    gm = graph_of("a = relu(x); v = wait(all_gather(w)); b = relu(a); return (b,)", x=torch.empty(2), w=unit(4))
    with FakeTensorMode(shape_env=ShapeEnv()):
        next(node for node in gm.graph.nodes if node.name == "a").meta["val"] = torch.nonzero(torch.ones(3))
    assert bytes_of(build_transfer_graph(gm.graph, world_size=2))["a"] == 8


def test_a_group_is_one_node_and_stands_behind_the_compute_before_it() -> None:
    text = "a = relu(x); g = all_gather(w, 0); h = all_gather(u, 0); v = wait(g); f = wait(h); b = mul(v, f); c = mul(a, b)"
    transfers = transfers_of(f"{text}; return (c,)", x=torch.empty(4), w=unit(4), u=unit(4))
    assert list(transfers) == ["a", "g", "v", "f", "b"]
    assert transfers.nodes["g"] == {"lane": "gather", "bytes": 16, "label": "all_gather w\nu"}
    assert edges_of(transfers, "order") == {"a -> g", "a -> v", "v -> f"}
    assert edges_of(transfers, "data") == {"g -> v", "g -> f", "v -> b", "f -> b", "a -> b"}


def test_transfers_of_one_kind_follow_each_other() -> None:
    text = "g = all_gather(w, 0); h = all_gather(u, 1); r = reduce_scatter(x, w, 0); s = reduce_scatter(x, u, 1); return (r, s)"
    transfers = transfers_of(text, x=torch.empty(4), w=unit(4), u=unit(4))
    assert set(transfers.edges) == {("g", "h"), ("r", "s")}


def test_swaps_have_lanes_of_their_own() -> None:
    text = """
        p = swap_in(w, "nvme", "host", 0); q = swap_in(u, "nvme", "host", 0)
        c = swap_in(p, "host", "device", 0); d = swap_in(q, "host", "device", 0)
        g = all_gather(c, 0); h = all_gather(d, 0); v = wait(g); f = wait(h); a = mul(v, f); release(v); release(f)
        r = reduce_scatter(a, w, 0); s = reduce_scatter(a, u, 0)
        o = swap_out(r, "device", "host"); l = swap_out(o, "host", "nvme"); m = swap_out(s, "device", "nvme")
        return (l, m)
    """
    transfers = transfers_of(text, w=unit(5), u=unit(5))
    lanes: dict[str, list[str]] = {}
    for node, lane in transfers.nodes.data("lane"):
        lanes.setdefault(lane, []).append(node)
    del lanes["compute"]
    assert lanes == {"read": ["p"], "copy in": ["c"], "gather": ["g"], "reduce": ["r"], "copy out": ["o"], "write": ["l", "m"]}
    assert transfers.nodes["p"] == {"lane": "read", "bytes": 2 * 3 * 4, "label": "read w\nu"}
    assert transfers.nodes["o"] == {"lane": "copy out", "bytes": 3 * 4, "label": "copy out w"}
    assert edges_of(transfers, "data") >= {"p -> c", "c -> g", "g -> v", "r -> o", "o -> l", "r -> m"}
    assert edges_of(transfers, "order") >= {"l -> m"}
    nodes, _, _ = parsed(transfer_dot([("swaps", transfers)]))
    assert len(nodes) == len(transfers)


@pytest.mark.parametrize(
    ("text", "cycle"),
    [
        ("g = all_gather(w, 0); h = all_gather(u, 1); k = all_gather(z, 0)", "g -> h -> g"),
        ("g = all_gather(w, 0); v = wait(g); a = relu(v); k = all_gather(z, 0)", "g -> v -> a -> g"),
    ],
)
def test_a_group_that_waits_for_itself_is_named(text: str, cycle: str) -> None:
    with pytest.raises(IllegalGraphError, match=f"in a cycle: {cycle}$"):
        transfers_of(text, w=unit(4), u=unit(4), z=unit(4))


@given(st.lists(st.tuples(st.integers(0, 50), st.sets(st.integers(1, 6), max_size=4)), min_size=1, max_size=8))
def test_the_critical_path_is_the_heaviest_of_all_paths(nodes: list[tuple[int, set[int]]]) -> None:
    transfers = nx.DiGraph()
    for number, (size, _) in enumerate(nodes):
        transfers.add_node(number, bytes=size)
    for number, (_, steps) in enumerate(nodes):
        transfers.add_edges_from((number, number + step) for step in steps if number + step < len(nodes))

    def heaviest(node: Any) -> int:
        return transfers.nodes[node]["bytes"] + max(map(heaviest, transfers.successors(node)), default=0)

    path = find_critical_path(transfers)
    assert all(transfers.has_edge(a, b) for a, b in itertools.pairwise(path))
    assert sum(transfers.nodes[node]["bytes"] for node in path) == max(map(heaviest, transfers))


def test_an_empty_graph_has_an_empty_path() -> None:
    assert find_critical_path(transfers_of("return (x,)", x=torch.empty(2))) == []


def test_dot_of_nothing_and_of_odd_names() -> None:
    assert parsed(transfer_dot([])) == ([], [], 0)
    transfers = transfers_of("a = relu(x); return (a,)", x=torch.empty(2))
    transfers.nodes["a"]["label"] = 'L["a\\b"]\nsecond'
    nodes, _, _ = parsed(transfer_dot([('a "title"', transfers)]))
    assert nodes == ['"0 a"']
    assert r'label="L[\"a\\b\"]\nsecond\n16 B"' in transfer_dot([("", transfers)])


def test_dot_shows_a_transfer_like_this() -> None:
    transfers = transfers_of("g = all_gather(w); v = wait(g); return ()", w=unit(4))
    assert transfer_dot([("forward", transfers)]) == (
        "digraph zinf {\n"
        "  rankdir=LR;\n"
        "  node [shape=box, style=filled];\n"
        "  subgraph cluster_0 {\n"
        '    label="forward";\n'
        '    "0 g" [label="all_gather w\\n8 B", fillcolor=lightblue, penwidth=3];\n'
        '    "0 v" [label="wait w", fillcolor=white];\n'
        '    "0 g" -> "0 v" [style=solid];\n'
        "  }\n"
        "}"
    )
