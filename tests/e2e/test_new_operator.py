"""A transfer operator that the product doesn't have: its row, its step and its pass are all that it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import Mlp, vectors
from torch import fx
from training import adamw, assert_same_models, plain_step, twins

from zinf_compile.backend.graph_compiler import GraphCompiler
from zinf_compile.config import Config
from zinf_compile.errors import IllegalGraphError
from zinf_compile.ir.op_spec import COPY_OUT, OpSpec, Volume, define
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Issued
from zinf_compile.passes import Pass
from zinf_compile.passes.analysis.print_graph import graph_text
from zinf_compile.passes.analysis.summary import summarize
from zinf_compile.passes.analysis.traffic import list_swaps, measure_traffic
from zinf_compile.passes.analysis.transfer_graph import build_transfer_graph
from zinf_compile.passes.graph.node_facts import parameters
from zinf_compile.passes.verify import verify
from zinf_compile.runtime.executor import PERFORM, Run


@dataclasses.dataclass(frozen=True)
class BackUp:
    """Copy shards to another tier."""

    dst: str
    units: tuple[int, ...]

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> BackUp:
        return cls(issued[0].args["dst"], tuple(i.args["unit"] for i in issued))

    @property
    def reads(self) -> tuple[int, ...]:
        return self.units

    @property
    def writes(self) -> tuple[int, ...]:
        return ()


back_up = define(
    OpSpec(
        name="back_up",
        schema="(Tensor unit, str src, str dst, int group=-1) -> ()",
        kernel=lambda unit, src, dst, group=-1: None,
        step=BackUp.of,
        lane=COPY_OUT,
        volume=Volume.SHARD,
    )
)


def insert_backups(gm: fx.GraphModule) -> fx.GraphModule:
    """Back all parameters up before the graph returns."""
    with gm.graph.inserting_before(gm.graph.output_node()):
        for unit, _ in list(parameters(gm.graph)):
            gm.graph.call_function(back_up, (unit, "device", "host", 3))
    return gm


class BackingUp(GraphCompiler):
    """Adds the pass, and keeps graphs and programs."""

    graphs: list[fx.GraphModule]
    programs: list[Program]

    def graph_passes(self, kind: str = "inference") -> tuple[Pass, ...]:
        return (*super().graph_passes(kind), insert_backups)

    def schedule(self, graph: fx.GraphModule, kind: str) -> Program:
        program = super().schedule(graph, kind)
        self.graphs.append(graph)
        self.programs.append(program)
        return program


def test_a_row_a_step_and_a_pass_make_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, torch.Tensor] = {}

    def perform(step: BackUp, run: Run) -> None:
        assert step.dst == "host"
        kept.update({run.units[register].name: run.units[register].shard.clone() for register in step.units})

    monkeypatch.setitem(PERFORM, BackUp, perform)
    eager, ours = twins(Mlp)
    compiler = BackingUp(Config.from_options({"compute": "fx"}))
    compiler.graphs, compiler.programs = [], []
    model: Any = torch.compile(ours, backend=compiler.compile)
    optimizers = [adamw(m.parameters()) for m in (eager, ours)]
    for step in range(2):
        before = {name: parameter.detach().clone() for name, parameter in eager.named_parameters()}
        losses = [plain_step(m, o, vectors(step)) for m, o in zip((eager, model), optimizers, strict=True)]
        assert torch.equal(*losses)
        assert kept.keys() == before.keys()
        for name, shard in kept.items():
            assert torch.equal(shard[: before[name].numel()], before[name].flatten()), name
    assert_same_models(eager, ours)

    graph, program = compiler.graphs[0], compiler.programs[0]
    count = len(kept)
    assert [len(s.units) for s in program.steps if isinstance(s, BackUp)] == [count], "one group, one step"
    verify(graph)
    text, name = graph_text(graph, sizes=True), next(iter(kept))
    assert text.count('"device", "host", 3)') == count
    assert f'back_up({name}, "device", "host", 3)' in text
    assert "back_up(" in summarize(graph)
    moved = sum(4 * parameter.numel() for parameter in eager.parameters())
    assert measure_traffic(graph.graph, world_size=1).copied_out == moved
    assert [swap.operator for swap in list_swaps(graph.graph, world_size=1)] == ["back_up"] * count
    lanes = build_transfer_graph(graph.graph, world_size=1).nodes.data("lane")
    assert [lane for _, lane in lanes].count(COPY_OUT) == 1
    *_, last_input = (node for node in graph.graph.nodes if node.op == "placeholder")
    last_input.append(next(node for node in graph.graph.nodes if node.target is back_up))
    with pytest.raises(IllegalGraphError, match="isn't adjacent to the others of its group 3"):
        verify(graph)
