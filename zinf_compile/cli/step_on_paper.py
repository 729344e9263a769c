"""A target's step on fake tensors, for `zinf plan`: its graphs, and how many tokens pass in a micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from zinf_compile.passes.analysis.step_problem import Pair

from .trace import Target
from .trace_step import trace_step


@dataclasses.dataclass(frozen=True, slots=True)
class TracedStep:
    """Graphs of a step, and the tokens of a micro-batch of one rank."""

    pairs: list[Pair]
    tokens: int


def traced_step(target: Target, options: Mapping[str, Any], *, world: int, host_is_device: bool) -> TracedStep:
    """Trace the target's forward and backward as one of `world` ranks. Raises what `trace` raises."""
    inputs: list[Any] = []

    def watched() -> Any:
        found = target()
        if isinstance(found, tuple) and len(found) == 2:
            inputs.append(found[1])
        return found

    pairs = trace_step(watched, options=options, world_size=world, device="cpu" if host_is_device else "cuda")
    return TracedStep(pairs, count_tokens(inputs[0]))


def count_tokens(inputs: Any) -> int:
    """Return the elements of the first tensor of whole numbers; without one, the rows of the first tensor."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else (inputs,)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    whole = next((t for t in tensors if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool), None)
    if whole is not None:
        return whole.numel()
    return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1
