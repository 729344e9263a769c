"""The states that an optimizer is going to have of each parameter, known before its first step: what a save would find then.

Called by `checkpoint`; changes nothing.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

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
                master = unit.placement.master_of(unit.dtype) if isinstance(parameter, ShardedParameter) and unit else None
                dtype = master or parameter.dtype
                kept = next((s.kept[parameter] for s in record_of(optimizer).offloaded or [] if parameter in s), None)
                if kept is None:
                    kept = {**states_kept(optimizer, group, dtype), **({MASTER: master} if master else {})}
                large = dict(kept)
                others = dict(other_states_kept(optimizer, group, dtype))
                if not parameter.dim():
                    others |= {name: torch.zeros((), dtype=kind) for name, kind in large.items()}
                    large = {}
                if large or others:
                    found[parameter] = OwnStates(unit, large, others)
    return found
