"""An estimate of what a backward will pass of parameters, from an evaluation of them that comes first.

`Fit` leaves room for it where homes are decided, `GraphBudget` where tiles follow from the cap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import Sides
from zinf_compile.plan.compute_memory import ComputeMemory
from zinf_compile.plan.graph_plan import GraphMemory
from zinf_compile.plan.memory_model import MemoryModel


def gradients_to_come(slots: Iterable[ParameterSlot], gathered: int) -> int:
    """Return the bytes of the gradients of as much of these parameters as `gathered` bytes are, where any is trained."""
    trained = [slot for slot in slots if slot.requires_grad and slot.numel]
    widest = max((slot.reduce_format.bytes(slot.numel) / slot.bytes for slot in trained), default=0)
    return math.ceil(widest * gathered)


def backward_to_come(model: MemoryModel, needs: GraphMemory, compute: ComputeMemory, gradients: int) -> Sides:
    """Return what a backward will pass: gradients of an evaluation's values, and `gradients` of what that gathers at once.

    These of as much as two of its regions gather, and of as much as one whose transfer goes on. What is saved between is left
    out: it may leave the device.
    """
    needs = dataclasses.replace(needs, left=2 * gradients, reduced=3 * gradients)
    return model.transient(needs, dataclasses.replace(compute, temporaries=2 * compute.temporaries)).least
