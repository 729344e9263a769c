"""New units for parameters that are about to be partitioned, with memory for their shards and gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.ir.tiling import Box, borders_of, cut_parameter
from zinf_compile.runtime.comm.shard_group import ShardGroup
from zinf_compile.runtime.comm.shard_ranges import shard_numel
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer

from .backing import HostBacking, NvmeBacking
from .nvme_gradient_pool import NvmeGradientPool
from .nvme_shards import NvmeShards, ShardSpec
from .unit import Unit


def make_units(
    parameters: Sequence[tuple[torch.Tensor, str]],
    context: Context,
    placement: Placement | Sequence[Placement],
    *,
    group: ShardGroup | None = None,
) -> list[Unit]:
    """Reserve all memory and all space on drives, then return a unit for each parameter, its shard undefined.

    The units are cut over `group`, by default over all ranks of the context. Raises `OptionError`
    where one would be cut into more tiles than a graph should have.

    `placement` is that of all parameters, or one for each. A parameter without dimensions, or without elements, stays on the
    device whatever it says, see `Placement.of_parameter`.
    """
    group = group or context.ranks.shard_group
    given = [placement] * len(parameters) if isinstance(placement, Placement) else placement
    homes = [own.of_parameter(dim=p.dim(), numel=p.numel()) for (p, _), own in zip(parameters, given, strict=True)]
    tiles = [cut_parameter(p, name, own.tile, group.size) for (p, name), own in zip(parameters, given, strict=True)]
    specs = [
        ShardSpec(name, shard_numel(p.numel(), group.size), p.dtype, cuts_of(boxes, group))
        for (p, name), boxes in zip(parameters, tiles, strict=True)
    ]
    backings = make_backings(specs, context, homes)
    pools = make_gradient_pools([(p, spec) for (p, _), spec in zip(parameters, specs, strict=True)], context, homes)
    staying = [p for (p, _), backing in zip(parameters, backings, strict=True) if backing is None]
    shards = iter(make_shards(staying, group))
    units = []
    for (parameter, name), backing, pool, boxes, own in zip(parameters, backings, pools, tiles, homes, strict=True):
        shard = next(shards) if backing is None else None
        unit = Unit(parameter, shard, name=name, context=context, placement=own, backing=backing, tiles=boxes, shard_group=group)
        unit.gradient_pool = pool
        units.append(unit)
        unit.family = units[0].serial
    return units


def shard_group_of(units: Iterable[Unit], context: Context) -> ShardGroup:
    """Return the group of a graph's units; where it has none yet, the one of units that are about to be made."""
    return next((unit.shard_group for unit in units if unit.context is context), context.ranks.shard_group)


def make_shards(parameters: list[torch.Tensor], group: ShardGroup) -> list[torch.Tensor]:
    """Allocate the shards of new units of a group, one allocation per data type and device, each shard 64-byte aligned."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    places: list[tuple[tuple[torch.dtype, torch.device], int, int]] = []
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        count = shard_numel(parameter.numel(), group.size)
        offset = sizes.get(key, 0)
        places.append((key, offset, count))
        aligned = 64 // math.gcd(64, format_of(parameter.dtype).bytes(1))
        sizes[key] = offset + -(-count // aligned) * aligned
    arenas = {key: torch.zeros(total, dtype=key[0], device=key[1]) for key, total in sizes.items()}
    return [arenas[key][offset : offset + count] for key, offset, count in places]


def cuts_of(boxes: Sequence[Box], group: ShardGroup) -> tuple[int, ...]:
    """Return the borders between tiles in a shard."""
    return tuple(border // group.size for border in borders_of(boxes)[1:-1])


def make_backings(
    specs: Sequence[ShardSpec], context: Context, homes: Sequence[Placement]
) -> list[NvmeBacking | HostBacking | None]:
    """Return the memory or the space on drives of each shard; None for what stays on the device."""
    backings: list[NvmeBacking | HostBacking | None] = [None] * len(specs)
    for tier, numbers in _alike(home.params for home in homes).items():
        placement, own = homes[numbers[0]], [specs[number] for number in numbers]
        if not tier.in_memory:
            shards = NvmeShards(
                placement.nvme,
                "parameter",
                own,
                context.engine,
                context.lanes.meter,
                context.memory.staging,
                piece_numel=placement.piece_numel,
                tier=tier,
            )
            for index, number in enumerate(numbers):
                backings[number] = NvmeBacking(shards, index)
        elif context.link.topology.is_offloaded(tier):
            pinned = context.device.type != "cpu"
            kept = [aligned_buffer(format_of(p.dtype).bytes(p.numel), pinned=pinned).view(p.dtype) for p in own]
            for number, shard in zip(numbers, kept, strict=True):
                context.memory.host_ledger.track("params", shard)
                backings[number] = HostBacking(shard)
    return backings


def make_gradient_pools(
    parameters: Sequence[tuple[torch.Tensor, ShardSpec]], context: Context, homes: Sequence[Placement]
) -> list[tuple[NvmeGradientPool, int] | None]:
    """Return for each parameter the pool of gradients on its drive, and its number there; None where it has none."""
    pools: list[tuple[NvmeGradientPool, int] | None] = [None] * len(parameters)
    for tier, numbers in _alike(home.grads for home in homes).items():
        trained = [number for number in numbers if parameters[number][0].requires_grad]
        if tier.in_memory or not trained:
            continue
        placement = homes[trained[0]]
        specs = [
            dataclasses.replace(spec, dtype=placement.reduce_dtype_of(p.dtype))
            for p, spec in map(parameters.__getitem__, trained)
        ]
        pool = NvmeGradientPool(
            placement.nvme,
            specs,
            context.engine,
            context.lanes.meter,
            context.memory.staging,
            piece_numel=placement.piece_numel,
            tier=tier,
        )
        for index, number in enumerate(trained):
            pools[number] = pool, index
    return pools


def _alike(tiers: Iterable[Tier]) -> dict[Tier, list[int]]:
    """Return the numbers of those that are on each tier."""
    found: dict[Tier, list[int]] = {}
    for number, tier in enumerate(tiers):
        found.setdefault(tier, []).append(number)
    return found
