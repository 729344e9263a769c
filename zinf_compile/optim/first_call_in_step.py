"""Checks optimizers whose running `step(closure)` makes the first compiled call: their pre-step check saw whole parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from zinf_compile._frames import calling_methods
from zinf_compile.ir.program import ParameterSlot

from .elementwise_probe import check_elementwise


def refuse_running_steps(fresh: Sequence[tuple[torch.Tensor, ParameterSlot]]) -> None:
    """Raise `UnsupportedOptimizerError` if a running step's optimizer needs whole one of the `fresh` parameters.

    The pre-step hook runs before the closure: it would miss LBFGS, whose every step has one.
    """
    slots = {id(parameter): slot for parameter, slot in fresh}
    for optimizer, method in calling_methods():
        if method == "step" and isinstance(optimizer, Optimizer):
            members = (id(p) for group in optimizer.param_groups for p in group["params"])
            slot = next((slots[member] for member in members if member in slots), None)
            if slot is not None:
                check_elementwise(optimizer, slot)
