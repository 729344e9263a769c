"""The problem of a target's step, for `zinf plan`: traced on fake tensors, the deepest models with few of their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from zinf_compile.errors import PlanError
from zinf_compile.passes.analysis.step_facts import StepFacts
from zinf_compile.passes.analysis.step_problem import Pair, step_problem
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.stretch import count_blocks, stretch

from .models import DEEP
from .target import Target, load_target
from .trace import nothing_compiled
from .trace_step import trace_step

TRACED = 6
"""Blocks of the deepest built-in models that are traced: the one that is copied, and what differs at both ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """How many blocks a model counts as having in a list of its own, and how many of them were traced."""

    name: str
    count: int
    traced: int = 0

    def __str__(self) -> str:
        return f"{self.traced} of {self.count} blocks of {self.name} traced; the others are planned as copies of the middle one"


@dataclasses.dataclass(frozen=True, slots=True)
class PaperStep:
    """A step's problem, the tokens of a micro-batch of one rank, and what of its blocks was traced if not all were."""

    problem: StepProblem
    tokens: int
    blocks: Blocks | None


def paper_step(
    target: str,
    options: Mapping[str, Any],
    facts: StepFacts,
    *,
    host_is_device: bool,
    micro_batches: int = 1,
    blocks: Blocks | None = None,
) -> PaperStep:
    """Trace the target's forward and backward as one of the ranks of `facts`, and return its step.

    `blocks`: how many blocks the target's list of this name counts as having. Raises what `trace` and `stretch` raise.
    """

    def made(build: Target, blocks: Blocks | None) -> PaperStep:
        pairs, tokens = _traced(build, options, world=facts.world_size, host_is_device=host_is_device)
        if not pairs:
            raise nothing_compiled(target)
        problem = step_problem(pairs, facts, micro_batches=micro_batches, name=target)
        if blocks is None:
            return PaperStep(problem, tokens, None)
        found = dataclasses.replace(blocks, traced=count_blocks(problem, blocks.name))
        return PaperStep(stretch(problem, blocks.name, blocks.count), tokens, found)

    deep = DEEP.get(target)
    if deep is None or (micro_batches > 1 if blocks is None else blocks.name != deep.blocks):
        return made(load_target(target), blocks)
    wanted = blocks or Blocks(deep.blocks, deep.count)
    try:
        return made(lambda: deep.build(min(TRACED, wanted.count)), wanted)
    except PlanError:
        if blocks is not None:
            raise
        return made(load_target(target), None)  # with these options its blocks differ from each other


def _traced(target: Target, options: Mapping[str, Any], *, world: int, host_is_device: bool) -> tuple[list[Pair], int]:
    inputs: list[Any] = []

    def watched() -> Any:
        found = target()
        if isinstance(found, tuple) and len(found) == 2:
            inputs.append(found[1])
        return found

    pairs = trace_step(watched, options=options, world_size=world, device="cpu" if host_is_device else "cuda")
    return pairs, count_tokens(inputs[0])


def count_tokens(inputs: Any) -> int:
    """Return the elements of the first tensor of whole numbers; without one, the rows of the first tensor."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else (inputs,)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    whole = next((t for t in tensors if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool), None)
    if whole is not None:
        return whole.numel()
    return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1
