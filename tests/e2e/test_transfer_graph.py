"""The graph of transfers of a model whose batch has no fixed size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from dot import parsed
from torch import nn
from tracing import compiled

from zinf_compile.passes import graph_passes, run_passes
from zinf_compile.passes.analysis.traffic import measure_traffic
from zinf_compile.passes.analysis.transfer_graph import build_transfer_graph, find_critical_path, transfer_dot


class Net(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


WAYS = {"device": (), "nvme": ("nvme", "device"), "host": ("host", "device"), "nvme over host": ("nvme", "host", "device")}


@pytest.fixture(scope="module", params=WAYS)
def scheduled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Both halves of a small model as they are run, with sizes of the batch unknown."""
    way = WAYS[request.param]
    graphs = compiled(Net(), torch.ones(6, 8), dynamic=True)
    passes = graph_passes(bucket_bytes=256, params=way, grads=way[::-1])
    return {kind: run_passes(graphs[kind], passes).graph for kind in ("forward", "backward")}


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_each_lane_is_a_chain_and_adds_up_to_the_traffic(scheduled: dict[str, Any], kind: str) -> None:
    transfers = build_transfer_graph(scheduled[kind], world_size=4)
    traffic = measure_traffic(scheduled[kind], world_size=4)
    sizes, path = dict(transfers.nodes.data("bytes")), find_critical_path(transfers)
    totals = {
        "gather": traffic.gathered,
        "reduce": traffic.reduced,
        "read": traffic.read,
        "copy in": traffic.copied_in,
        "copy out": traffic.copied_out,
        "write": traffic.written,
    }
    for lane in ("compute", *totals):
        members = [node for node, found in transfers.nodes.data("lane") if found == lane]
        assert all(transfers.has_edge(a, b) for a, b in itertools.pairwise(members))
        assert lane == "compute" or sum(sizes[node] for node in members) == totals[lane]
        assert sum(sizes[node] for node in path) >= sum(sizes[node] for node in members)
    assert all(size > 0 for node, size in sizes.items() if transfers.nodes[node]["lane"] != "compute")


def test_dot_has_each_node_and_edge_once(scheduled: dict[str, Any]) -> None:
    graphs = [(kind, build_transfer_graph(graph, world_size=4)) for kind, graph in scheduled.items()]
    dot = transfer_dot(graphs)
    nodes, edges, clusters = parsed(dot)
    assert clusters == 2
    assert len(nodes) == len(set(nodes)) == sum(len(g) for _, g in graphs)
    assert len(edges) == len(set(edges)) == sum(g.number_of_edges() for _, g in graphs)
    assert {end for edge in edges for end in edge} <= set(nodes)
    bold = [line for line in dot.splitlines() if "penwidth=3" in line and "->" not in line]
    assert len(bold) == sum(len(find_critical_path(g)) for _, g in graphs)
