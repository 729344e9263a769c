"""Partitioning of whole parameters: rank 0's values, spread over the ranks. Called by the first compiled call that uses them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from zinf_compile._torch import no_torch_function
from zinf_compile.ir.tiers import Placement
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.create import make_units
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import scatter_whole

from .parameter import hollow_out
from .unpartitioned import average_the_rest, stop_averaging


def partition(parameters: Mapping[int, tuple[nn.Parameter, str]], context: Context, placement: Placement) -> None:
    """Make whole parameters hollow: rank 0's values, spread over the ranks unit by unit.

    First those that leave the device, which a drive may refuse: until all are kept, all stay whole.
    """
    distinct = list({id(parameter): (parameter, name) for parameter, name in parameters.values()}.values())
    with torch.inference_mode(False), torch.no_grad(), no_torch_function():
        with context.ranks.fail_together("reserving room for parameters"):  # a drive may be full on one rank
            made = make_units(distinct, context, placement)
        units = list(zip(distinct, made, strict=True))
        for (parameter, name), unit in units:
            if unit.backing is not None:
                _spread(parameter, unit, name)
        for (parameter, name), unit in units:
            if unit.backing is None:
                _spread(parameter, unit, name)
                context.memory.ledger.track("params", unit.shard)
            hollow_out(parameter, unit)
            stop_averaging(parameter)
    context.memory.gather_memory.clear()  # shards passed through it, whole; steps need no more than tiles at a time
    average_the_rest([parameter for parameter, _ in distinct], context, placement)


def _spread(parameter: nn.Parameter, unit: Unit, name: str) -> None:
    """Scatter rank 0's value into the shards of all ranks."""
    shard = unit.blank()
    full = unit.flat(parameter.detach()) if unit.shard_group.rank == 0 else None
    scatter_whole(unit, full, shard, f"partitioning {name}")
    unit.save(shard)
