"""The passes on graphs as torch.compile captures them: of dynamic shapes, with higher-order operators, with checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from irtext import text_of
from losses import LOSSES, Head, batch
from pipeline import MODULES, NEED_DYNAMO, apply, assert_every_prefix
from torch import fx, nn
from tracing import compiled, traced

from zinf_compile.passes import graph_passes, joint_passes
from zinf_compile.passes.graph.alias import alias_closure, aliased_inputs, derived_from
from zinf_compile.passes.graph.node_facts import parameters, skipped_notes
from zinf_compile.passes.loss.chunk_loss import chunk_loss
from zinf_compile.passes.lower import collective_sequence, lower


@pytest.mark.parametrize(
    "name", ["autocast", "returned", "shape_only", "standardised", "positions", "tied", "lora", "odd_shapes"]
)
def test_what_the_tests_of_the_passes_trace_is_what_torch_compile_captures(name: str) -> None:
    found = []
    for way in (traced, compiled):
        torch.manual_seed(0)
        module, inputs = MODULES[name]()
        slots = {kind: (text_of(gm), [slot for _, slot in parameters(gm.graph)]) for kind, gm in way(module, *inputs).items()}
        found.append(slots)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", NEED_DYNAMO)
def test_every_prefix_of_the_pipeline_is_legal_and_keeps_the_numbers(name: str) -> None:
    module, inputs = MODULES[name]()
    assert_every_prefix(compiled(module, *inputs), name)


@pytest.mark.parametrize("name", ["positions", "mlp", "autocast", "autocast_of_rows"])
def test_dynamic_shapes_go_the_same_way(name: str) -> None:
    module, inputs = MODULES[name]()
    graphs = compiled(module, *inputs, dynamic=True)
    assert any(isinstance(node.meta["val"], torch.SymInt) for node in graphs["forward"].graph.find_nodes(op="placeholder"))
    apply(graphs.pop("joint"), joint_passes(), complete=False)
    for graph in graphs.values():
        apply(graph, graph_passes(bucket_bytes=300), complete=True)


@pytest.mark.parametrize("name", ["mlp", "autocast", "autocast_of_rows", "standardised", "checkpoint"])
def test_ranks_with_other_batch_sizes_or_dynamic_shapes_move_the_same(name: str) -> None:
    sequences = set()
    for rows, dynamic in ((3, False), (4000, False), (3, True)):
        torch.compiler.reset()
        module, inputs = MODULES[name]()
        inputs = tuple(torch.randn(rows, t.shape[1]) for t in inputs)
        whole = dynamic or name in NEED_DYNAMO
        graphs = compiled(module, *inputs, dynamic=dynamic) if whole else traced(module, *inputs)
        parts = []
        for kind in ("forward", "backward", "inference"):
            for step in graph_passes(bucket_bytes=300):
                step(graphs[kind])
            parts.append(collective_sequence(graphs[kind].graph))
        sequences.add(tuple(parts))
    assert len(sequences) == 1


def test_dynamic_shapes_are_left_alone() -> None:
    head, (x, targets) = Head(LOSSES["mean"]), batch()
    joint = compiled(head, x.requires_grad_(), targets, dynamic=True)["joint"]
    before = text_of(joint)
    assert text_of(chunk_loss(joint, enabled=True)) == before
    assert "its number of tokens is dynamic" in skipped_notes(joint)[0]


def test_operators_without_a_schema_are_assumed_to_share_all_inputs() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda x, w: (x * w,), lambda x, w: (x - w,), (x, self.w))[0].sum()

    graph: fx.Graph = compiled(Branch(), torch.randn(4))["inference"].graph
    cond = next(n for n in graph.nodes if n.op == "call_function" and "cond" in n.name)
    weight = next(n for n in cond.all_input_nodes if n.op == "placeholder")
    assert weight in aliased_inputs(cond)
    assert cond in alias_closure(weight)
    assert cond not in derived_from([weight])


def test_a_region_is_given_the_symbols_that_its_inputs_sizes_are_made_of() -> None:
    class Shortened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x)[2:].relu())

    graphs = compiled(Shortened(), torch.randn(7, 4), dynamic=True)
    regions: list[fx.GraphModule] = []

    def keep(region: fx.GraphModule) -> Any:
        regions.append(region)

    for kind in ("forward", "backward"):
        for step in graph_passes(bucket_bytes=1):
            step(graphs[kind])
        lower(graphs[kind], name=kind, compile_region=keep)
    assert any(placeholders_of(region, torch.SymInt) for region in regions)
    for region in regions:
        tensors = [node.meta["val"] for node in placeholders_of(region, torch.Tensor)]
        numbers = [node.meta["val"] for node in placeholders_of(region, torch.SymInt)]
        sizes = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
        given = {n.node.expr for n in (*numbers, *sizes) if n.node.expr.is_Symbol}
        assert {symbol for size in sizes for symbol in size.node.expr.free_symbols} <= given


def placeholders_of(region: fx.GraphModule, kind: type) -> list[fx.Node]:
    return [node for node in region.graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], kind)]
