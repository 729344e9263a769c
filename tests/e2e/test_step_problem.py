"""Problems of steps from models on fake tensors, as `zinf plan` makes them."""

from __future__ import annotations

import pytest
import torch
from pipeline import MODULES
from step_problems import facts
from torch import nn
from tracing import compiled

from zinf_compile.cli.models import GPT, TARGETS, Example
from zinf_compile.cli.trace_step import trace_step
from zinf_compile.passes import region_passes, run_passes
from zinf_compile.passes.analysis.step_problem import step_problem
from zinf_compile.plan.planners import just_in_time, one_ahead
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.plan.verify import verify


def test_gpt2_small() -> None:
    pairs = trace_step(TARGETS["gpt2-small"], options={"compute": "fx"}, world_size=2)
    problem = step_problem(pairs, facts(world_size=2))
    model, (tokens, _) = TARGETS["gpt2-small"]()
    assert isinstance(model, GPT)
    numel = sum(p.numel() for p in model.parameters())
    assert sum(unit.full_bytes for unit in problem.units) == 4 * numel
    assert sum(unit.gradient_bytes for unit in problem.units) == 4 * numel // 2
    assert sum(piece.state_bytes for piece in problem.pieces) == 8 * numel // 2
    assert sum(len(unit.gradients) for unit in problem.units) == len(problem.units)
    tied = problem.unit["wte.weight"]
    first, last = tied.uses[0], tied.uses[-1]
    assert problem.regions[first].name.startswith("forward 0:0")  # the embedding
    assert problem.regions[last].graph == "backward 0"  # the head's
    blocks = [region for region in problem.regions if region.graph == "forward 0" and ":" in region.name and " h." in region.name]
    assert len({region.structure for region in blocks[1:11]}) == 1
    products = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "wpe" not in name)
    attention = 12 * 4 * 1024 * 1024 * 768 / 1e12
    forward = sum(region.seconds for region in problem.regions if region.graph == "forward 0")
    assert forward == pytest.approx(2 * products * tokens.numel() / 1e12 + attention, rel=0.02)
    for planner in (just_in_time, one_ahead):
        assert not verify(problem, planner(problem))
    assert step_seconds(problem, one_ahead(problem)) < step_seconds(problem, just_in_time(problem))


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        out: torch.Tensor = self.second(y)
        return out


def _broken() -> Example:
    return Broken(), (torch.zeros(4, 8),)


def test_graphs_of_one_model_run_one_after_the_other() -> None:
    problem = step_problem(trace_step(_broken, options={"compute": "fx"}), facts())
    assert [region.graph for region in problem.regions] == ["forward 0", "forward 1", "backward 1", "backward 0"]
    assert {name.split(".")[0]: unit.gradients for name, unit in problem.unit.items()} == {"first": (3,), "second": (2,)}
    assert not verify(problem, one_ahead(problem))


def test_dynamic_sizes_count_as_traced() -> None:
    module, inputs = MODULES["mlp"]()
    pairs = []
    for dynamic in (False, True):
        torch.compiler.reset()
        found = compiled(module, *inputs, dynamic=dynamic)
        pairs.append(tuple(run_passes(found[k], region_passes(bucket_bytes=300)).graph for k in ("forward", "backward")))
    fixed, free = (step_problem([pair], facts()) for pair in pairs)
    assert [r.seconds for r in free.regions] == [r.seconds for r in fixed.regions]
    assert [(v.bytes, v.made_in, v.used_in) for v in free.saved] == [(v.bytes, v.made_in, v.used_in) for v in fixed.saved]
