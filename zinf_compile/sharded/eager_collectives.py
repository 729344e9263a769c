"""Collectives for what eager code of a forward uses whole on several ranks: a gather, and the reduction of its gradient.

Dynamo runs some forwards eagerly, as those with a graph break in a loop, and a parameter that such code uses may be partitioned
by another graph. Eager code has no schedule: ranks compare each of these operations before it begins, so that ranks whose code
differs, by a draw of their own for one, get an error that names the parameter. What autograd keeps of a gathered value stays
until the backward has used it, as in eager code.
"""

from __future__ import annotations

import torch

from zinf_compile.errors import BudgetError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.memory.own_storage import with_own_storage
from zinf_compile.runtime.units.fetch import reserve
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import gather_whole

from .tensor import ShardedTensor


def gather_for_eager(unit: Unit) -> torch.Tensor:
    """Return a copy of a unit's value, gathered on every rank; `BudgetError` on all where one has no room. Collective."""
    what = f"gathering {unit.name}, unit {unit.serial}, for eager code of a forward"
    ledger = unit.context.memory.ledger
    with torch.no_grad():
        with unit.ranks.fail_together(what, elsewhere=BudgetError(f"{what} failed on another rank, see there")):
            reserve(unit, ledger)
            shard = unit.load()
        full = unit.context.full_buffer(unit.numel, unit.dtype, unit.device)
        gather_whole(unit, shard, full, what)
    ledger.track("gathered", full)
    return unit.logical(full)


def gather_alike(tensor: ShardedTensor) -> torch.Tensor:
    """Return a whole copy of what is partitioned like a unit, on every rank. Raises as `gather_for_eager`. Collective."""
    unit = tensor.unit
    what = f"gathering a tensor partitioned like {unit.name}, unit {unit.serial}, for eager code of a forward"
    ledger = unit.context.memory.ledger
    with unit.ranks.fail_together(what, elsewhere=BudgetError(f"{what} failed on another rank, see there")):
        reserve(unit, ledger, format_of(tensor.dtype).bytes(tensor.numel()))
    full = tensor.full_tensor()
    ledger.track("gathered", full)
    with torch.inference_mode(False):
        return with_own_storage(full)  # no view for autograd


def reduce_for_eager(unit: Unit, flat: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of the mean of a flat gradient over the ranks. Collective."""
    what = f"reducing the gradient of {unit.name}, unit {unit.serial}, {flat.dtype}, of eager code"
    unit.ranks.agree([what], what=what)
    context = unit.context
    shard = flat.new_zeros(unit.shard_numel)
    shards, fulls = unit.split(shard, flat)
    reductions = context.collectives(unit.shard_group)[1]
    context.finish(context.lanes.reduce.submit(lambda: reductions.reduce_scatter(fulls, shards)), what)
    return shard
