"""An estimate of what graphs to come compute at once, or the loss of a model that returns none: homes in the first graph are
decided before they are known.

It decides what stays on the device, and refuses nothing: where it is too high more is transferred, where it is too low a later
graph may be refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.analysis.saved_memories import returned
from zinf_compile.passes.graph.node_facts import hinted_numel

COPIES = 5
"""Of a result such as logits at once: itself, two that a loss makes of it, and gradients of two."""

_ITEM_BYTES = 4
"""Losses compute in float32."""


def compute_to_come(forward: fx.Graph, results: int | None, parameters: Iterable[ParameterSlot]) -> int:
    """Return the bytes of what is computed with the `results` that a graph returns first.

    Where it returns its loss, none is computed of them any more. `parameters`: with which graphs to come may multiply them.
    """
    given = [node for node in returned(forward)[:results] if isinstance(node, fx.Node)]
    values = [value for node in given if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_floating_point()]
    matrices = [slot.shape for slot in parameters if len(slot.shape) == 2]
    has_loss = any(not value.dim() for value in values)
    numel = max((max(0 if has_loss else hinted_numel(value), _product(value, matrices)) for value in values), default=0)
    return COPIES * _ITEM_BYTES * numel


def _product(value: torch.Tensor, matrices: Iterable[Sequence[int]]) -> int:
    """Return the elements of the largest product of a value's rows and one of the matrices, or its transpose."""
    if value.dim() < 2:
        return 0
    last = value.shape[-1]
    width = last.node.hint or 0 if isinstance(last, torch.SymInt) else last
    widest = max((math.prod(shape) // width for shape in matrices if width and width in shape), default=0)
    return hinted_numel(value) // max(1, width) * widest
