"""Swaps as the executor performs them: each member of a group by itself, or several by one transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zinf_compile.ir.steps import SwapIn, SwapOut
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.units.pending_updates import Updates
from zinf_compile.runtime.units.swap import (
    SwapHandle,
    is_small_for_drive,
    is_small_on_drive,
    pass_on_together,
    read_together,
    stays_on_host,
    swap_in,
    swap_in_together,
    swap_out,
    swap_out_together,
    write_out_together,
)
from zinf_compile.runtime.units.unit import Tile, Unit

from .handles import HeldCopy, HeldShard, ReduceHandle
from .run import Run


def perform_swap_in(step: SwapIn, run: Run) -> None:
    """Start the swaps of a group to its devices, or one hop of their way there."""
    members: Sequence[tuple[int, int]] = step.members
    if run.context.full_copies or run.takes_copies:
        members = _without_copies(members, run)
    if len(members) > 1 and step.dst == Tier.DEVICE and run.context.link.copies_together:
        members = _swap_in_together(members, run)
    elif len(members) > 1 and not Tier(step.src).in_memory:
        members = _read_together(members, step.dst, run)
    for source, out in members:
        earlier = run.registers[source] if isinstance(run.registers[source], SwapHandle) else None
        unit: Unit | Tile = run.units[source] if earlier is None else earlier.unit
        run.registers[out] = swap_in(unit, step.src, step.dst, earlier)


def _read_together(members: Sequence[tuple[int, int]], dst: str, run: Run) -> list[tuple[int, int]]:
    """Start one read of those of a group that are on drives and small; return the other members."""
    reads = {
        out: unit
        for source, out in members
        if (unit := run.units.get(source)) is not None
        and not isinstance(run.registers[source], SwapHandle)
        and is_small_on_drive(unit)
    }
    if len(reads) > 1:
        for out, handle in zip(reads, read_together(list(reads.values()), dst), strict=True):
            run.registers[out] = handle
    return [member for member in members if len(reads) == 1 or member[1] not in reads]


def _without_copies(members: Sequence[tuple[int, int]], run: Run) -> list[tuple[int, int]]:
    """Leave out the units of which the device has a full copy, or the shard, for their gathers. Return the other members."""
    left = []
    for source, out in members:
        value = run.registers[source]
        unit = run.units.get(source)
        if isinstance(value, HeldCopy | HeldShard):
            run.registers[out] = value
        elif not isinstance(value, SwapHandle) and unit is not None and run.context.full_copies.holds(unit):
            run.registers[out] = HeldCopy(unit)
            run.takes_copies = True  # also where another thread drops it before the next hop
        elif (found := _found_shard(value, unit, run)) is not None:
            run.registers[out] = found
            run.takes_copies = True
        else:
            left.append((source, out))
    return left


def _found_shard(value: object, unit: Unit | Tile | None, run: Run) -> HeldShard | None:
    """Return the shard that a forward has left for this graph, its backward; None where it is to be brought."""
    if isinstance(value, SwapHandle) or unit is None or unit.backing is None:
        return None
    shard = run.context.full_copies.take_shard(unit, unit.dtype)
    return None if shard is None else HeldShard(unit, shard)


def _swap_in_together(members: Sequence[tuple[int, int]], run: Run) -> list[tuple[int, int]]:
    """Start one copy of those of a group that are in host memory, and one of those that a step has still to update there.

    And one of those that one read brings there. Return the other members.
    """
    rows: dict[Updates[Unit] | None, list[tuple[Unit | Tile, int]]] = {}
    reads: dict[int, list[tuple[SwapHandle, int]]] = {}
    for source, out in members:
        value = run.registers[source]
        if isinstance(value, SwapHandle):
            if value.pending is not None and value.unit.backing is not None:
                reads.setdefault(id(value.pending), []).append((value, out))
            continue
        unit = run.units[source]
        if unit.resident is None:
            continue
        if unit.updated() is None:
            rows.setdefault(None, []).append((unit, out))
        elif isinstance(unit, Unit):
            rows.setdefault(unit.updates, []).append((unit, out))
    begun = dict[int, SwapHandle]()
    for updates, together in rows.items():
        if len(together) > 1:
            handles = swap_in_together([unit for unit, _ in together], updates)
            begun.update(zip((out for _, out in together), handles, strict=True))
    for passing in reads.values():
        if len(passing) > 1:
            handles = pass_on_together([earlier for earlier, _ in passing])
            begun.update(zip((out for _, out in passing), handles, strict=True))
    for out, handle in begun.items():
        run.registers[out] = handle
    return [member for member in members if member[1] not in begun]


def perform_swap_out(step: SwapOut, run: Run) -> None:
    """Start one hop of a group of gradients on their way to their tiers."""
    members: Sequence[tuple[int, int]] = step.members
    if len(members) > 1 and step.dst == Tier.HOST and run.context.link.copies_together:
        members = _leave_together(step, run, stays_on_host, swap_out_together)
    elif len(members) > 1 and not Tier(step.dst).in_memory:
        members = _leave_together(step, run, is_small_for_drive, write_out_together)
    for source, out in members:
        grad = run.registers[source]
        run.registers[out] = grad if grad.at_home else hop_out(grad, step.dst)


def _leave_together(step: SwapOut, run: Run, joins: Callable[..., bool], leave: Callable[..., Any]) -> list[tuple[int, int]]:
    """Start to move those of a group that join one transfer; return the other members."""
    found = {out: run.registers[source] for source, out in step.members}
    together = {
        out: grad for out, grad in found.items() if not grad.at_home and grad.together is None and joins(grad.unit, grad.shard)
    }
    if len(together) > 1:
        leaving = leave([(grad.unit, grad.shard, grad.reduction) for grad in together.values()])
        for (out, grad), (shard, pending) in zip(together.items(), leaving, strict=True):
            run.registers[out] = ReduceHandle(grad.unit, shard, pending)
    return [member for member in step.members if len(together) == 1 or member[1] not in together]


def hop_out(grad: ReduceHandle, dst: str) -> ReduceHandle:
    """Start one hop of a gradient, to tier `dst`."""
    swap: Any = swap_out if grad.together is None else grad.together.swap_out
    shard, leaving = swap(grad.unit, grad.shard, dst, grad.reduction)
    return ReduceHandle(grad.unit, shard, leaving, grad.together)
