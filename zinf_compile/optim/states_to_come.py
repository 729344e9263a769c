"""The states that an optimizer is going to have of each parameter, known before its first step: what a save would find then.

Called by `checkpoint`; changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import MASTER
from .elementwise_probe import other_states_kept, states_kept
from .record import record_of
from .split_states import split_units
from .state_pieces import OwnStates, own_states


def states_to_come(optimizer: Optimizer) -> dict[torch.Tensor, OwnStates]:
    """Return the states of each parameter that has some or is trained, as `own_states` does; of the latter, the types and kinds.

    Those of a parameter that is updated in other types, and of an optimizer that updates it as a whole, are as far as is known.
    """
    present, split = own_states(optimizer), split_units(optimizer)
    found: dict[torch.Tensor, OwnStates] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in present:
                found[parameter] = present[parameter]
            elif parameter.requires_grad:
                unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else split.get(parameter)
                large = dict(large_states_to_come(optimizer, group, parameter, unit))
                dtype = _master_of(parameter, unit) or parameter.dtype
                others = dict(other_states_kept(optimizer, group, dtype))
                if not parameter.dim():
                    others |= {name: torch.zeros((), dtype=kind) for name, kind in large.items()}
                    large = {}
                if large or others:
                    found[parameter] = OwnStates(unit, large, others)
    return found


def large_states_to_come(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, unit: Unit | None
) -> Mapping[str, torch.dtype]:
    """Return the states of its parameter's size that the first step makes of a parameter, its master copy included."""
    for states in record_of(optimizer).offloaded or []:
        if parameter in states:
            kept: Mapping[str, torch.dtype] = states.kept[parameter]
            return kept
    master = _master_of(parameter, unit)
    return {**states_kept(optimizer, group, master or parameter.dtype), **({MASTER: master} if master else {})}


def _master_of(parameter: torch.Tensor, unit: Unit | None) -> torch.dtype | None:
    """Return the type of a parameter's master copy; None: it has none."""
    return unit.placement.master_of(unit.dtype) if isinstance(parameter, ShardedParameter) and unit is not None else None
