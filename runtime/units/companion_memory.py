"""Memory for tensors that are partitioned like a parameter, on the tier of that parameter."""

from __future__ import annotations

import gc
import weakref

import torch

from zinf_compile.errors import BudgetError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.memory.ledger import Kind
from zinf_compile.runtime.memory.named_caps import name_cap
from zinf_compile.runtime.system.process_wide import process_wide

from .backing import HostBacking, NvmeBacking, ShardBacking
from .nvme_gradient_pool import NvmeGradientPool
from .nvme_shards import ShardSpec
from .shard_values import BackedShard, DeviceShard, ShardValues
from .unit import Unit

_Key = tuple[int, torch.dtype]
_Pool = tuple[NvmeGradientPool, dict[int, int]]
_pools: weakref.WeakKeyDictionary[Context, dict[_Key, _Pool]] = process_wide(weakref.WeakKeyDictionary())
"""Pools by row of units that were partitioned together and data type, with the number of each unit's place."""


def make_values(unit: Unit, dtype: torch.dtype, *, lasting: bool) -> ShardValues:
    """Return memory for a shard like a unit's, content undefined, on the unit's tier.

    One that is not `lasting`, an intermediate result, is in host memory where that has room within the cap. Raises `BudgetError`
    where memory has none.
    """
    context, size = unit.context, format_of(dtype).bytes(unit.shard_numel)
    if unit.backing is None:
        return DeviceShard(unit, on_device(unit, dtype, "staging"))
    if not lasting and not unit.backing.tier.in_memory and context.memory.has_room(context.memory.host_ledger, size):
        shard = context.memory.staged_buffer(unit.shard_numel, dtype)
        return BackedShard(unit, HostBacking(shard), dtype) if context.link.topology.host_apart else DeviceShard(unit, shard)
    return BackedShard(unit, backing_like(unit, dtype, "staging"), dtype)


def on_device(unit: Unit, dtype: torch.dtype, kind: Kind) -> torch.Tensor:
    """Return memory of the device for a shard like a unit's, counted and within the cap; content undefined."""
    context = unit.context
    check_room(unit, dtype)
    with torch.inference_mode(False), torch.no_grad():
        shard = torch.empty(unit.shard_numel, dtype=dtype, device=unit.device)
    context.memory.ledger.track(kind, shard)
    return shard


def backing_like(unit: Unit, dtype: torch.dtype, kind: Kind) -> ShardBacking:
    """Return a place for a shard like that of a unit which is off the device; free again when it is dropped."""
    assert unit.backing is not None, "on the device a shard needs no backing"
    if unit.backing.tier.in_memory:
        check_room(unit, dtype, on_host=True)
        buffer = aligned_buffer(format_of(dtype).bytes(unit.shard_numel), pinned=unit.device.type != "cpu").view(dtype)
        unit.context.memory.host_ledger.track(kind, buffer)
        return HostBacking(buffer)
    pool, numbers = _pool_of(unit, dtype)
    index = numbers[_root(unit.serial)]
    shards = pool.take(index)
    backing = NvmeBacking(shards, index)
    weakref.finalize(backing, pool.give_back, index, shards).atexit = False
    return backing


def check_room(unit: Unit, dtype: torch.dtype, *, on_host: bool = False) -> None:
    """Raise `BudgetError` where a shard like a unit's exceeds the cap on memory of the device or of the host."""
    context, size = unit.context, format_of(dtype).bytes(unit.shard_numel)
    ledger = context.memory.host_ledger if on_host else context.memory.ledger
    context.memory.make_room(ledger, size)
    if not context.memory.has_room(ledger, size):
        gc.collect()
    if not context.memory.has_room(ledger, size):
        named = name_cap(context.memory, ledger, context.memory.least_cap(ledger, size))
        raise BudgetError(
            f"a tensor partitioned like {unit.name} takes {size:,} bytes on this rank. {named}. Or drop other tensors, or let "
            'parameters live on a drive (option params="nvme"), where such tensors then live too'
        )


def _pool_of(unit: Unit, dtype: torch.dtype) -> tuple[NvmeGradientPool, dict[int, int]]:
    """Return the pool of all units that were partitioned together with this one: few files for many tensors."""
    context, family = unit.context, _root(unit.family)
    known = _pools.setdefault(context, {})
    found = known.get((family, dtype))
    if found is None or _root(unit.serial) not in found[1]:
        row = {_root(u.serial): u for u in context.units if _root(u.family) == family and u.backing is not None}
        members = [row[serial] for serial in sorted(row)]
        specs = [ShardSpec(u.name, u.shard_numel, dtype, u.cuts) for u in members]
        folders = unit.placement.nvme
        assert unit.backing is not None, "on the device a shard needs no backing"
        pool = NvmeGradientPool(
            folders,
            specs,
            context.engine,
            context.lanes.meter,
            context.memory.staging,
            piece_numel=unit.placement.piece_numel,
            kind="tensor partitioned like",
            tier=unit.backing.tier,
        )
        found = known[family, dtype] = pool, {_root(u.serial): number for number, u in enumerate(members)}
    return found


TWIN = 1 << 32
"""Serials of a parameter's twins are its own plus multiples of this."""


def _root(serial: int) -> int:
    return serial % TWIN
