"""What the optimizers of this process keep for each parameter: for problems of whole steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zinf_compile.ir.program import ParameterSlot
from zinf_compile.optim.chunks import MASTER
from zinf_compile.optim.record import all_records
from zinf_compile.optim.state_entry import in_memory, states_of
from zinf_compile.sharded.parameter import ShardedParameter

from .kept_graphs import States


def states_of_optimizers() -> States:
    """Return the states by the parameters' names; those of a parameter that no optimizer has stepped yet are Adam's."""
    known: dict[str, Mapping[str, torch.dtype]] = {}
    for optimizer, record in all_records():
        for offloaded in record.offloaded or ():
            known.update((parameter._zinf_unit.name, kept) for parameter, kept in offloaded.kept.items())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, ShardedParameter) and parameter._zinf_unit.name not in known:
                    kept = in_memory(states_of(optimizer, parameter))
                    if kept:
                        known[parameter._zinf_unit.name] = {
                            name: value.dtype
                            for name, value in kept.items()
                            if isinstance(value, torch.Tensor) and value.numel() > 1
                        }

    def kept_for(slot: ParameterSlot) -> Mapping[str, torch.dtype] | None:
        return known.get(slot.name, known.get(slot.name.partition("[")[0]))

    def types(slot: ParameterSlot) -> tuple[torch.dtype, ...]:
        kept = kept_for(slot)
        return (slot.dtype, slot.dtype) if kept is None else tuple(kept.values())

    return States(types, lambda slot: MASTER in (kept_for(slot) or {}))
