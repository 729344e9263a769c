"""A problem stretched from few blocks is that of the deep model."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from step_problems import facts

from zinf_compile.cli.models import Example, Llama
from zinf_compile.cli.trace_step import trace_step
from zinf_compile.errors import PlanError
from zinf_compile.passes.analysis.step_problem import step_problem
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.stretch import count_blocks, stretch

OPTIONS = {"compute": "fx", "bucket": "64KiB"}


def llama(layers: int, *, checkpointed: bool, bucket: int | str = "64KiB", frozen: int = 0, embedded: bool = True) -> StepProblem:
    def build() -> Example:
        model = Llama(layers=layers, width=256, heads=4, kv_heads=2, hidden=512, vocabulary=999, checkpointed=checkpointed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(f"layers.{number}." in name for number in range(frozen)))
            parameter.requires_grad_(parameter.requires_grad and (embedded or "tokens" not in name))
        tokens = torch.zeros(1, 64, dtype=torch.long)
        return model, (tokens, tokens)

    traced = trace_step(build, options={**OPTIONS, "bucket": bucket}, world_size=4, device="cuda")
    return step_problem(traced, facts(world_size=4, host=True))


def contents(problem: StepProblem) -> dict[str, Any]:
    return {
        "regions": [(r.seconds, r.workspace_bytes, r.graph) for r in problem.regions],
        "units": {u.name: (u.stored_bytes, u.full_bytes, u.uses, u.gradients, u.structure) for u in problem.units},
        "pieces": {p.name: (p.units, p.state_bytes) for p in problem.pieces},
        "saved": Counter((v.bytes, v.made_in, v.used_in, v.choices) for v in problem.saved),
    }


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_stretched_problem_is_that_of_the_deep_model(checkpointed: bool) -> None:
    few, many = llama(6, checkpointed=checkpointed), llama(9, checkpointed=checkpointed)
    found, expected = contents(stretch(few, "layers", 9)), contents(many)
    for what, rows in expected.items():
        assert found[what] == rows, what


@pytest.mark.parametrize(
    ("layers", "blocks", "count", "message"),
    [
        (3, "layers", 6, r"blocks \[0, 1, 2\] are too few to see a period; accepted: 5 or more"),
        (3, "blocks", 6, "no parameter is in a list 'blocks'; accepted: one of layers$"),
        (3, "layers", 2, "the model has 3 blocks in layers, more than 2; accepted: 3 or more"),
    ],
)
def test_what_cannot_be_stretched_is_refused(layers: int, blocks: str, count: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stretch(llama(layers, checkpointed=False), blocks, count)


def test_blocks_of_which_some_are_frozen_are_told_to_differ() -> None:
    with pytest.raises(PlanError, match="the blocks in the middle differ, or share what only some of them use"):
        stretch(llama(6, checkpointed=False, frozen=3), "layers", 9)
    with pytest.raises(PlanError, match="the blocks in the middle are not all trained, or are used in another order"):
        stretch(llama(6, checkpointed=False, frozen=3, embedded=False), "layers", 9)


def test_blocks_in_one_bucket_are_copied_with_the_bucket_that_the_refusal_names() -> None:
    with pytest.raises(PlanError, match="several blocks are gathered at once") as refused:
        stretch(llama(6, checkpointed=False, bucket="64MiB"), "layers", 9)
    named = re.search(r"""--options '{"bucket": (\d+)}'""", str(refused.value))
    assert named is not None
    problem = stretch(llama(6, checkpointed=False, bucket=int(named[1])), "layers", 9)
    assert count_blocks(problem, "layers") == 9


def test_as_many_blocks_as_there_are_need_no_period() -> None:
    problem = llama(3, checkpointed=False)
    assert stretch(problem, "layers", 3) is problem


@pytest.mark.parametrize("layers", [6, 7])
def test_blocks_that_differ_are_not_copied(layers: int) -> None:
    """Every other one has a wider part, as in models that alternate between two kinds of attention."""

    def build() -> Example:
        model = Llama(layers=layers, width=256, heads=4, kv_heads=2, hidden=512, vocabulary=999)
        for block in model.layers[::2]:
            block.gate, block.up, block.down = (torch.nn.Linear(*s, bias=False) for s in ((256, 640), (256, 640), (640, 256)))
        tokens = torch.zeros(1, 64, dtype=torch.long)
        return model, (tokens, tokens)

    problem = step_problem(trace_step(build, options=OPTIONS, world_size=4, device="cuda"), facts(world_size=4, host=True))
    with pytest.raises(PlanError, match="the blocks in the middle differ, or share what only some of them use; trace the whole"):
        stretch(problem, "layers", 9)


class TwoStacks(torch.nn.Module):
    """Two lists of blocks with one name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = torch.nn.Module(), torch.nn.Module()
        for stack in (self.encoder, self.decoder):
            stack.layers = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.encoder.layers, *self.decoder.layers):
            x = x + layer(x).relu()
        return x.sum()


def test_a_name_of_two_lists_is_refused_and_one_of_them_stretched() -> None:
    pairs = trace_step(lambda: (TwoStacks(), (torch.zeros(8, 256),)), options=OPTIONS, world_size=4, device="cuda")
    problem = step_problem(pairs, facts(world_size=4, host=True))
    message = "'layers' is the end of decoder.layers and encoder.layers; accepted: one list, such as 'decoder.layers'"
    with pytest.raises(PlanError, match=message):
        stretch(problem, "layers", 9)
    longer = stretch(problem, "decoder.layers", 9)
    assert sum("decoder.layers" in unit.name for unit in longer.units) == 9 * sum(
        "decoder.layers.0." in unit.name for unit in problem.units
    )
    assert [unit for unit in longer.units if "encoder" in unit.name and "decoder" not in unit.name]
