"""Estimates of what training will pass of parameters, or of others like them, from an evaluation of them that comes first.

`Fit` leaves room for it where homes are decided, `GraphBudget` where tiles follow from the cap, and beside what runs ahead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch

from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import Sides
from zinf_compile.plan.compute_memory import ComputeMemory
from zinf_compile.plan.graph_plan import GraphMemory
from zinf_compile.plan.memory_model import MemoryModel, step_chunk


def gradients_to_come(slots: Iterable[ParameterSlot], gathered: int) -> int:
    """Return the bytes of the gradients of as much of these parameters as `gathered` bytes are, where any is trained."""
    trained = [slot for slot in slots if slot.requires_grad and slot.numel]
    widest = max((slot.reduce_format.bytes(slot.numel) / slot.bytes for slot in trained), default=0)
    return math.ceil(widest * gathered)


def chunk_to_come(model: MemoryModel, slots: Iterable[ParameterSlot], placements: Placements) -> Sides:
    """Return the bytes of a chunk of steps that a `model` without one may be followed by: of parameters like its `slots`.

    A frozen teacher or reference runs before the model beside it that is trained, and may be of a narrower type.
    """
    if any(model.chunk):
        return Sides(0, 0)
    trained = [
        dataclasses.replace(slot, requires_grad=True, dtype=torch.float32) for slot in slots if slot.dtype.is_floating_point
    ]
    return step_chunk(trained, placements, size=model.size, topology=model.topology)[1]


def backward_to_come(model: MemoryModel, needs: GraphMemory, compute: ComputeMemory, gradients: int) -> Sides:
    """Return what a backward will pass: gradients of an evaluation's values, and `gradients` of what that gathers at once.

    These of as much as two of its regions gather, and of as much as one whose transfer goes on. What is saved between is left
    out: it may leave the device.
    """
    needs = dataclasses.replace(needs, left=2 * gradients, reduced=3 * gradients)
    return model.transient(needs, dataclasses.replace(compute, temporaries=2 * compute.temporaries)).least
