"""Whether all ranks compile a graph at the same point: then they decide about it together, and partition its parameters ahead.

Note: together or alone
    All ranks compile a function's first graph at the same point. A further one may be one rank's alone, for another batch. But
    the first one for other parameters that nothing has used is that of another model of the same class, such as a frozen
    reference beside its policy, and all ranks compile it. Parameters that differ in nothing but that they are not partitioned are
    those of equal blocks, or experts, each compiled by itself: one more graph does for all of them until each was called. That
    must find ordinary parameters at its next call, too, by Dynamo's guards, so they are partitioned when it is called.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from zinf_compile._torch import compile_numbers
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.parameter import unit_of

_kinds: dict[int, set[Hashable]] = process_wide({})
"""The kinds of parameters for which each function was compiled."""


def compiled_together(slots: Iterable[ParameterSlot], inputs: Sequence[Any], signature: str) -> bool:
    """Say whether all ranks compile a graph at this point: the function's first, or its first for such parameters, all unused.

    `signature`: of the options. Called once for each graph.
    """
    numbers = compile_numbers()
    if numbers is None:
        return False
    function, number = numbers
    slots = list(slots)
    known = _kinds.setdefault(function, set())
    if number == 0:
        known.clear()  # of a function before `torch.compiler.reset`
    kind = signature, torch.is_grad_enabled(), *((slot.shape, slot.dtype, slot.requires_grad) for slot in slots)
    is_new = kind not in known
    known.add(kind)
    return number == 0 or (is_new and bool(slots) and all(unit_of(inputs[slot.index]) is None for slot in slots))
