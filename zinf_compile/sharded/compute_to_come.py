"""An estimate of what graphs to come compute at once, or the loss of a model that returns none: homes in the first graph are
decided before they are known.

It decides what stays on the device, and refuses nothing: where it is too high more is transferred, where it is too low a later
graph may be refused.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    """Return the bytes of what is computed with the `results` that a graph returns first: none where it returns its loss.

    `parameters`: with which graphs to come may multiply them.
    """
    given = [node for node in returned(forward)[:results] if isinstance(node, fx.Node)]
    values = [value for node in given if isinstance(value := node.meta.get("val"), torch.Tensor)]
    values = [value for value in values if value.is_floating_point() and value.dim() > 1]
    widest = max((max(slot.shape) for slot in parameters if len(slot.shape) > 1), default=0)
    numel = max((max(hinted_numel(value), _rows(value) * widest) for value in values), default=0)
    return COPIES * _ITEM_BYTES * numel


def _rows(value: torch.Tensor) -> int:
    last = value.shape[-1]
    return hinted_numel(value) // max(1, (last.node.hint or 0) if isinstance(last, torch.SymInt) else last)
