"""A copy of a partitioned parameter, partitioned alike: each rank copies its own shard, and sends nothing."""

from __future__ import annotations

import collections
import weakref

import torch

from zinf_compile.runtime.context import Context
from zinf_compile.runtime.system.process_wide import process_wide

from .companion_memory import TWIN, backing_like, on_device
from .shard_values import BackedShard, ParameterShard, pieces_of
from .unit import Unit

_copies: weakref.WeakKeyDictionary[Context, collections.Counter[int]] = process_wide(weakref.WeakKeyDictionary())
"""Number of copies of each parameter, by its serial."""


def twin_of(unit: Unit, parameter: torch.Tensor) -> Unit:
    """Return a unit for `parameter`, a hollow tensor like the unit's own, with the values as they are after the last step.

    It is numbered by how often the parameter was copied: ranks that copy alike number alike, and one that copies alone leaves
    the numbers of all other units as they are.
    """
    with torch.inference_mode(False), torch.no_grad():
        unit.wait_updated()
        counted = _copies.setdefault(unit.context, collections.Counter())
        counted[unit.serial % TWIN] += 1
        number = counted[unit.serial % TWIN] * TWIN
        backing = None if unit.backing is None else backing_like(unit, unit.dtype, "params")
        shard = on_device(unit, unit.dtype, "params").copy_(unit.shard) if backing is None else None
        if backing is not None:
            source, target = ParameterShard(unit), BackedShard(unit, backing, unit.dtype)
            for start, end in pieces_of(unit):
                target.write(start, source.fetch(start, end)()).wait()
        twin = Unit(
            parameter,
            shard,
            name=unit.name,
            context=unit.context,
            placement=unit.placement,
            backing=backing,
            tiles=unit.boxes,
            serial=unit.serial % TWIN + number,
            shard_group=unit.shard_group,
        )
        twin.family = unit.family % TWIN + number
        twin.gradient_pool = unit.gradient_pool  # which lays out more where both have gradients at a time
        return twin
