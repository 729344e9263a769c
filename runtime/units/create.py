"""New units for parameters that are about to be partitioned, with memory for their shards and gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.tiers import Placement
from zinf_compile.ir.tiling import Box, borders_of, cut_parameter
from zinf_compile.runtime.comm.shard_group import ShardGroup
from zinf_compile.runtime.comm.shard_ranges import shard_numel
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer

from .backing import HostBacking, NvmeBacking, ShardBacking
from .nvme_gradient_pool import NvmeGradientPool
from .nvme_shards import NvmeShards, ShardSpec
from .unit import Unit


def make_units(
    parameters: Sequence[tuple[torch.Tensor, str]], context: Context, placement: Placement, *, group: ShardGroup | None = None
) -> list[Unit]:
    """Reserve all memory and all space on drives, then return a unit for each parameter, its shard undefined.

    The units are cut over `group`, by default over all ranks of the context. Raises `OptionError`
    where one would be cut into more tiles than a graph should have.

    A parameter without dimensions, or without elements, stays on the device whatever the placement says, see
    `Placement.of_parameter`.
    """
    group = group or context.ranks.shard_group
    moving = [bool(p.dim() and p.numel()) for p, _ in parameters]
    tiles = [cut_parameter(p, name, placement.tile, group.size) for p, name in parameters]
    specs = [
        ShardSpec(name, shard_numel(p.numel(), group.size), p.dtype, _cuts(boxes, group))
        for (p, name), boxes in zip(parameters, tiles, strict=True)
    ]
    offloaded = [index for index, moves in enumerate(moving) if moves]
    backings = _make_backings([specs[index] for index in offloaded], context, placement)
    pools = _make_gradient_pools([(parameters[index][0], specs[index]) for index in offloaded], context, placement)
    in_order = iter(zip(backings, pools, strict=True))
    backing_of = [next(in_order) if moves else (None, None) for moves in moving]
    staying = [p for (p, _), (backing, _) in zip(parameters, backing_of, strict=True) if backing is None]
    shards = iter(make_shards(staying, group))
    units = []
    for (parameter, name), (backing, pool), boxes in zip(parameters, backing_of, tiles, strict=True):
        shard = next(shards) if backing is None else None
        own = placement.of_parameter(dim=parameter.dim(), numel=parameter.numel())
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


def _cuts(boxes: Sequence[Box], group: ShardGroup) -> tuple[int, ...]:
    return tuple(border // group.size for border in borders_of(boxes)[1:-1])


def _make_backings(specs: Sequence[ShardSpec], context: Context, placement: Placement) -> Sequence[ShardBacking | None]:
    if not placement.params.in_memory and specs:
        shards = NvmeShards(
            placement.nvme,
            "parameter",
            specs,
            context.engine,
            context.lanes.meter,
            context.memory.staging,
            piece_numel=placement.piece_numel,
            tier=placement.params,
        )
        return [NvmeBacking(shards, index) for index in range(len(specs))]
    if context.link.topology.is_offloaded(placement.params):
        pinned = context.device.type != "cpu"
        kept = [aligned_buffer(format_of(p.dtype).bytes(p.numel), pinned=pinned).view(p.dtype) for p in specs]
        for shard in kept:
            context.memory.host_ledger.track("params", shard)
        return [HostBacking(shard) for shard in kept]
    return [None] * len(specs)


def _make_gradient_pools(
    parameters: Sequence[tuple[torch.Tensor, ShardSpec]], context: Context, placement: Placement
) -> list[tuple[NvmeGradientPool, int]] | list[None]:
    trained = [dataclasses.replace(spec, dtype=placement.reduce_dtype_of(p.dtype)) for p, spec in parameters if p.requires_grad]
    if placement.grads.in_memory or not trained:
        return [None] * len(parameters)
    pool = NvmeGradientPool(
        placement.nvme,
        trained,
        context.engine,
        context.lanes.meter,
        context.memory.staging,
        piece_numel=placement.piece_numel,
        tier=placement.grads,
    )
    numbers = iter(range(len(trained)))
    return [(pool, next(numbers)) if p.requires_grad else None for p, _ in parameters]  # type: ignore[return-value]
