"""Units that no graph has used yet, cut into other tiles: on one rank, where a shard's elements stay in their order.

`create` cuts them at first. A unit stays the same object.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from zinf_compile._torch import no_torch_function
from zinf_compile.ir.pieces import cut_pieces
from zinf_compile.ir.tiling import cut_parameter
from zinf_compile.runtime.transfer.move import move, on_host, route_of

from .backing import NvmeBacking
from .create import cuts_of, make_backings, make_gradient_pools
from .nvme_shards import ShardSpec
from .unit import Unit


def recut(units: Sequence[Unit], tile: int | None, piece_numel: int, *, empty: bool = False) -> None:
    """Cut units of one rank into tiles of at most `tile` bytes, and their shards into pieces of `piece_numel` elements.

    What is on a drive is copied there, a piece at a time, unless shards are `empty`: their values are still to come. Raises
    `StoreError`, or `OptionError`, before any unit is changed.
    """
    owned = [(unit, parameter) for unit in units if (parameter := unit.parameter()) is not None]
    if not owned:
        return
    context, group = owned[0][0].context, owned[0][0].shard_group
    assert group.size == 1, "the shards of several ranks follow from the tiles"
    homes = [
        dataclasses.replace(u.placement, tile=tile, piece_numel=piece_numel).of_parameter(dim=len(u.shape), numel=u.numel)
        for u, _ in owned
    ]
    with no_torch_function():
        boxes = [cut_parameter(parameter, unit.name, tile, 1) for unit, parameter in owned]
    specs = [
        ShardSpec(unit.name, unit.shard_numel, unit.dtype, cuts_of(own, group))
        for (unit, _), own in zip(owned, boxes, strict=True)
    ]
    away = [number for number, (unit, _) in enumerate(owned) if unit.on_drive]
    backings = dict(zip(away, make_backings([specs[n] for n in away], context, [homes[n] for n in away]), strict=True))
    pools = make_gradient_pools([(p, spec) for (_, p), spec in zip(owned, specs, strict=True)], context, homes)
    for number, backing in backings.items():
        assert isinstance(backing, NvmeBacking), "on a drive"
        if not empty:
            _copy(owned[number][0], specs[number], backing, piece_numel)
    for number, ((unit, _), own, pool) in enumerate(zip(owned, boxes, pools, strict=True)):
        unit.placement, unit.gradient_pool = homes[number], pool
        unit.backing = backings.get(number, unit.backing)
        unit.cut(own)


def _copy(unit: Unit, spec: ShardSpec, into: NvmeBacking, piece_numel: int) -> None:
    """Copy a shard from drive to drive, one piece of each at a time in memory."""
    source, route = unit.backing, route_of(unit.context)
    assert source is not None
    old = cut_pieces(spec.numel, piece_numel=unit.placement.piece_numel, cuts=unit.cuts)
    new = cut_pieces(spec.numel, piece_numel=piece_numel, cuts=spec.cuts)
    starts = [start for start, _ in old]
    memory = unit.context.memory
    read, written = (memory.staged_buffer(max(end - start for start, end in each), unit.dtype) for each in (old, new))
    held = (0, 0)
    for first, last in new:
        at = first
        while at < last:
            if not held[0] <= at < held[1]:
                held = old[bisect.bisect(starts, at) - 1]
                move(source.location(*held), on_host(read[: held[1] - held[0]]), by=route).wait()
            end = min(last, held[1])
            written[at - first : end - first] = read[at - held[0] : end - held[0]]
            at = end
        move(on_host(written[: last - first]), into.location(first, last), by=route).wait()
