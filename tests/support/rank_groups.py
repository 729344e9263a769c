"""Units that are cut over some of a model's ranks, as functions for `test_shard_groups.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zinf_compile.init.value_stores import UnitValues
from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.runtime.comm.shard_group import REPLICATE, SHARD, MeshAxis, ShardGroup
from zinf_compile.runtime.context import Context, context_for
from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.units.create import make_units
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import gather_whole
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.gradient_norms import global_norms


def made_over(context: Context, group: ShardGroup | None, params: Tier, folder: str) -> dict[str, Any]:
    """Make units of a group, one in tiles and one that is uneven, save their values, and load these from all its ranks."""
    placement = Placement(params=params, grads=params, optimizer=params, tile=64, piece_numel=16, nvme=(folder,))
    wholes = {"tiled": torch.arange(120.0).view(12, 10), "uneven": -torch.arange(7.0), "number": torch.tensor(3.0)}
    units = make_units([(value, name) for name, value in wholes.items()], context, placement, group=group)
    found: dict[str, Any] = {}
    for unit, value in zip(units, wholes.values(), strict=True):
        UnitValues(unit).save(value.reshape(-1)).wait()
        into = torch.empty(unit.numel)
        UnitValues(unit).load(into)
        found[unit.name] = torch.equal(into, value.reshape(-1)), unit.shard_numel, len(unit.tiles), unit.shard_group.partition
    return found


def two_halves(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Cut one unit over all ranks and one over each half of them, with copies in the other half."""
    half = size // 2
    context = context_for(dist.group.WORLD, torch.device("cpu"), timeout_s=20, signature="two halves")
    before = len(context.ranks.groups)
    first = rank // half * half
    axes = (MeshAxis(REPLICATE, 2), MeshAxis(SHARD, half))
    group = ShardGroup(rank, tuple(range(first, first + half)), (rank % half, rank % half + half), axes)
    whole = torch.arange(7.0) + 100 * (rank // half)
    unit = Unit(whole, torch.empty(-(-7 // half)), name="half", context=context, shard_group=group)
    unit.shard.copy_(unit.local_part(whole))
    everywhere = Unit(torch.arange(7.0), torch.empty(-(-7 // size)), name="all", context=context)
    everywhere.shard.copy_(everywhere.local_part(torch.arange(7.0)))
    gathered = {}
    for each in (unit, everywhere, unit):
        full = context.full_buffer(each.numel, each.dtype, each.device)
        gather_whole(each, each.shard, full, "gathering")
        gathered[each.name] = full.tolist()
    gradients = [ShardedGradient(each, each.shard, Done()) for each in (everywhere, unit, everywhere)]
    norms = [norm.item() for norm in global_norms(gradients, 2.0, torch.float64)]
    full = {gradient.unit.name: gradient.full_tensor().tolist() for gradient in gradients}
    made = len(context.ranks.groups) - before
    unit.ranks.of(group).agree([f"half {first}"], what="comparing halves")
    created = {
        (name, tier): made_over(context, over, tier, folder)
        for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)
        for name, over in (("half", group), ("all", None))
    }
    return {
        "created": created,
        "gathered": gathered,
        "norms": norms,
        "full": full,
        "numbers": unit.ranks.exchange(torch.tensor([float(rank), 1.0]), what="numbers")[:, 0].tolist(),
        "everyone": everywhere.ranks.exchange(torch.tensor([float(rank)]), what="number").flatten().tolist(),
        "shared": unit.ranks.share(rank, what="rank 0 of each half"),
        "made": made,
        "later": len(context.ranks.groups) - before - made,
    }
