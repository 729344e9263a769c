"""Bytes of a captured graph that stay where they live: shards, reduced gradients, chunks of a step, and states to come."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.transfer.move import UpdateRoute
from zinf_compile.runtime.units import pieces


@dataclasses.dataclass(frozen=True)
class Resident:
    """What stays on the device, and in host memory beside it, in bytes."""

    device: int
    host: int
    slot_device: int
    """Of one chunk during a step."""
    slot_host: int
    later: int
    """On the device, of what isn't known before the first step: a guess, Adam's two states of each, a master copy where there is
    one, and a second gradient."""
    later_host: int
    """The same, in host memory beside it."""


def measure_resident(
    slots: Sequence[ParameterSlot], placement: Placement, context: Context, *, size: int, held: Collection[int] = ()
) -> Resident:
    """Add up what a captured graph's parameters, gradients and chunks take where they live; states come with their optimizer.

    The shards of those in `held`, by `ParameterSlot.index`, are on the account already.
    """
    topology = context.bridge.topology
    sides = {Tier.DEVICE: 0, Tier.HOST: 0}
    largest = total = 0
    for slot in slots:
        shard = math.ceil(slot.numel / size)
        place = placement.of_parameter(dim=len(slot.shape), numel=slot.numel)
        own = () if slot.index in held else ((place.params, slot.dtype),)
        reduced = ((place.grads, place.reduce_dtype_of(slot.dtype)),) if slot.requires_grad else ()
        for tier, dtype in (*own, *reduced):
            if (side := topology.side(tier)) is not None:
                sides[side] += format_of(dtype).bytes(shard)
        if slot.requires_grad:
            largest = max(largest, min(shard, pieces.PIECE_NUMEL))
            total += -(-shard // pieces.ALIGN) * pieces.ALIGN
    numel = min(-(-max(largest, pieces.PIECE_NUMEL) // pieces.ALIGN) * pieces.ALIGN, total)
    route = UpdateRoute(context.bridge, update_on_device=placement.update_on_device)
    rooms = [0, 0]
    values, gradients, kept = (route.needs(tier) for tier in (placement.params, placement.grads, placement.optimizer))
    brought = route.needs(Tier.DEVICE)  # where a user's own gradient is
    for slot in slots:
        if slot.requires_grad:
            place = placement.of_parameter(dim=len(slot.shape), numel=slot.numel)
            gradient, states = format_of(place.reduce_dtype_of(slot.dtype)).bytes(numel), _state_bytes(place, slot.dtype, numel)
            for end in range(2):
                one = slot.format.bytes(numel) * values[end] + gradient * (gradients[end] or brought[end]) + states * kept[end]
                rooms[end] = max(rooms[end], one)
    later = {Tier.DEVICE: 0, Tier.HOST: 0}
    for slot in slots:
        if slot.requires_grad:
            place = placement.of_parameter(dim=len(slot.shape), numel=slot.numel)
            shard = math.ceil(slot.numel / size)
            second = format_of(place.reduce_dtype_of(slot.dtype)).bytes(shard)
            for more, tier in ((_state_bytes(place, slot.dtype, shard), place.optimizer), (second, place.grads)):
                if (side := topology.side(tier)) is not None:
                    later[side] += more
    return Resident(sides[Tier.DEVICE], sides[Tier.HOST], rooms[1], rooms[0], later[Tier.DEVICE], later[Tier.HOST])


def _state_bytes(placement: Placement, dtype: torch.dtype, numel: int) -> int:
    """Return what Adam keeps of so many elements: two states, and a master copy where there is one."""
    master = placement.master_of(dtype)
    return 2 * format_of(dtype).bytes(numel) if master is None else 3 * format_of(master).bytes(numel)
