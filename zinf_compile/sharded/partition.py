"""Partitioning of whole parameters: rank 0's values, spread over the ranks. Called by the first compiled call that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from zinf_compile._torch import no_torch_function
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.ir.tiers import Placement
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.create import make_units
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import scatter_whole

from .earlier_gradients import spread_gradients
from .held_values import in_use
from .parameter import hollow_out
from .shared_memory import check_shared, leave
from .unpartitioned import average_the_rest, stop_averaging


def partition(
    parameters: Mapping[int, tuple[nn.Parameter, str]],
    context: Context,
    placement: Callable[[int], Placement],
    *,
    called: bool,
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Make whole parameters hollow, at the `placement` of their key: rank 0's values, spread over the ranks unit by unit.

    First those that leave the device, which a drive may refuse: until all are kept, all stay whole. All ranks have the same
    order. `called`: a graph has been called with the parameters, not compiled for them; `buffers`: those that it uses.
    """
    first: dict[int, int] = {}
    for key, (parameter, _) in parameters.items():
        first.setdefault(id(parameter), key)
    distinct, homes = [parameters[key] for key in first.values()], [placement(key) for key in first.values()]
    with torch.inference_mode(False), torch.no_grad(), no_torch_function():
        used = in_use((parameter for parameter, _ in distinct), called=called)
        with context.ranks.fail_together("reserving room for parameters"):  # a drive may be full on one rank
            for parameter, name in distinct:
                _check_memory(parameter, name)
            check_shared({name: parameter for parameter, name in distinct}, buffers)
            made = make_units(distinct, context, homes)
        units = list(zip(distinct, made, strict=True))
        grads = {number: p.grad for number, (p, _) in enumerate(distinct) if p.grad is not None}
        for (parameter, name), unit in units:
            if unit.backing is not None:
                _spread(parameter, unit, name)
        for (parameter, name), unit in units:
            if unit.backing is None:
                _spread(parameter, unit, name)
                context.memory.ledger.track("params", unit.shard)
            leave(parameter, name, unit)
            if id(parameter) in used:
                hollow_out(parameter, unit, held=parameter.detach())
            else:
                hollow_out(parameter, unit)
                torch.autograd.graph.increment_version(parameter)  # should a use have escaped, its backward is refused
            stop_averaging(parameter)
        spread_gradients(grads, [(parameter, unit) for (parameter, _), unit in units], context)
    context.memory.gather_memory.clear()  # shards passed through it, whole; steps need no more than tiles at a time
    types = next((home for (parameter, _), home in zip(distinct, homes, strict=True) if parameter.numel()), homes[0])
    average_the_rest([parameter for parameter, _ in distinct], context, types)


def _check_memory(parameter: nn.Parameter, name: str) -> None:
    """Raise `PartitionedParameterError` for a parameter without memory.

    PyTorch itself performs `parameter.data = value` on a whole parameter, and takes a partitioned value for one with memory.
    """
    if parameter.numel() and not parameter.data_ptr():
        raise PartitionedParameterError(
            f"parameter {name} has no memory: it was given, by `parameter.data = value`, a value computed from partitioned "
            "parameters, which a parameter that isn't partitioned yet can't take over. Write the value into it instead, on all "
            "ranks: `parameter.data.copy_(value)`"
        )


def _spread(parameter: nn.Parameter, unit: Unit, name: str) -> None:
    """Scatter rank 0's value into the shards of all ranks."""
    shard = unit.blank()
    full = unit.flat(parameter.detach()) if unit.shard_group.rank == 0 else None
    scatter_whole(unit, full, shard, f"partitioning {name}")
    unit.save(shard)
