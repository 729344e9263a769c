"""Perform the steps that make full units: gathers, waits for them, lookups of rows, and units that are kept for the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.steps import Gather, GatherRows, KeepUnit, Wait
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.link_meter import moving
from zinf_compile.runtime.memory.cast_order import cast_order
from zinf_compile.runtime.units.gather_rows import gather_rows
from zinf_compile.runtime.units.swap import SwapHandle, bring
from zinf_compile.runtime.units.unit import Tile, Unit

from .context import Context
from .handles import GatherHandle, HeldCopy, unit_and_tile
from .run import Run

Members = Sequence[tuple[int, int]]
"""The registers of units, or of swaps of them, and those of their handles."""


def perform_gather(step: Gather, run: Run) -> None:
    members = _take_copies(step, run) if run.context.full_copies else step.members
    if not members:
        return
    if run.context.size == 1:
        _gather_at_hand(step, members, run)
        return
    group = _unit_behind(members[0][0], run).shard_group
    if group.size == 1:
        _gather_at_hand(step, members, run)
        return
    registers, context = run.registers, run.context
    arriving = [_arriving(source, run) for source, _ in members]
    gathered = [_unit_behind(source, run) if a is None else a.unit for (source, _), a in zip(members, arriving, strict=True)]
    gathers, _ = context.collectives(group)
    what = _gathering(step, gathered, run)
    shards = [unit.shard if a is None else a.shard for unit, a in zip(gathered, arriving, strict=True)]
    following = (unit.updated() if a is None else a.pending for unit, a in zip(gathered, arriving, strict=True))
    before = [pending for pending in following if pending is not None]
    context.memory.make_room(context.memory.ledger, format_of(step.dtype).bytes(sum(unit.numel for unit in gathered)))
    if run.handed is not None and run.handed.wanted and run.handed.shards:
        _hand_on_shards(members, arriving, run)
    staying = [_staying(unit) for unit in gathered]
    flats = [
        # what autograd keeps is PyTorch's memory, and none of the arena that gathers share; so is what stays
        (context.full_buffer if stays or out in run.program.kept else context.gather_buffer)(unit.numel, step.dtype, unit.device)
        for unit, stays, (_, out) in zip(gathered, staying, members, strict=True)
    ]
    parts = [unit.split(shard, flat) for unit, shard, flat in zip(gathered, shards, flats, strict=True)]
    count = (group.size - 1) * format_of(step.dtype).bytes(sum(shard.numel() for shard in shards))

    def gather() -> None:
        with moving([context.lanes.meter], "from ranks", count, what):
            gathers.all_gather([s for own, _ in parts for s in own], [f for _, whole in parts for f in whole])

    pending = context.lanes.start(context.lanes.gather, gather, after=before)
    context.lanes.meter.moved("from ranks", count)
    for unit, stays, (_, out), flat in zip(gathered, staying, members, flats, strict=True):
        full = unit.logical(flat)
        context.memory.ledger.track("gathered", full)
        registers[out] = GatherHandle(full, pending, what, stays=stays)


def _take_copies(step: Gather, run: Run) -> Members:
    """Take the copies that stay on the device; return the members that have none."""
    left = []
    for source, out in step.members:
        unit = _unit_behind(source, run)
        copy = run.context.full_copies.find(unit, step.dtype)
        if copy is None:
            left.append((source, out))
        else:
            run.registers[out] = GatherHandle(copy, None)
    return left


def _hand_on_shards(members: Members, arriving: Sequence[SwapHandle | None], run: Run) -> None:
    """Let a backward have the shards that it finds, of units that the forward gathers for the last time."""
    handed, program = run.handed, run.program
    assert handed is not None, "there is a backward"
    for (_, out), arrived in zip(members, arriving, strict=True):
        slot = program.last_gathers.get(out)
        if arrived is None or arrived.unit.backing is None or slot is None:
            continue
        if (program.key_of(slot), arrived.unit.dtype) in handed.wanted:
            unit, tile = unit_and_tile(arrived.unit)
            run.context.full_copies.hand_on_shard(unit, arrived.shard, tile=tile)


def _unit_behind(source: int, run: Run) -> Unit | Tile:
    value = run.registers[source]
    return value.unit if isinstance(value, SwapHandle | HeldCopy) else run.units[source]


def _staying(unit: Unit | Tile) -> Unit | None:
    """Return the unit, where its full copy is to stay on the device."""
    return unit if isinstance(unit, Unit) and unit.full_copy_numel else None


def _arriving(source: int, run: Run) -> SwapHandle | None:
    """Return the swap of a unit that is about to be gathered, begun now if the graph has none; None where it is on the device."""
    value = run.registers[source]
    if isinstance(value, SwapHandle):
        return value
    unit = _unit_behind(source, run)
    return None if unit.backing is None else bring(unit)


def _gather_at_hand(step: Gather, members: Members, run: Run) -> None:
    """Gather units that are not cut into shards: the shard, on the device or in flight to it, is the whole."""
    registers, units, dtype = run.registers, run.units, step.dtype
    to_cast: dict[int, torch.Tensor] = {}
    for source, out in members:
        unit = units.get(source)  # None: a swap brings it
        arrived = None if unit is not None and unit.backing is None else _arriving(source, run)
        if unit is None:
            unit = _unit_behind(source, run) if arrived is None else arrived.unit
        narrower = dtype if dtype != unit.dtype else None
        if arrived is not None and unit.backing is not None:
            full, what = unit.logical(arrived.shard), _gathering(step, [unit], run)
            registers[out] = GatherHandle(full, arrived.pending, what, narrower, stays=_staying(unit))
            continue
        whole, updated = unit.whole_memory(), unit.updated()
        if updated is not None:
            registers[out] = GatherHandle(whole, updated, _gathering(step, [unit], run), narrower)
        elif narrower is None:
            registers[out] = GatherHandle(whole, None)
        else:
            to_cast[out] = whole
    if to_cast:
        for out, full in zip(to_cast, _cast_together([*to_cast.values()], dtype, run.context), strict=True):
            registers[out] = GatherHandle(full, None)


def perform_wait(step: Wait, run: Run) -> None:
    gathered: GatherHandle = run.registers[step.handle]
    if gathered.pending is not None:
        run.context.finish(gathered.pending, gathered.what)
    run.registers[step.out] = _full_of(gathered, run.context)


def perform_waits(steps: Sequence[Wait], frees: Sequence[Sequence[int]], run: Run) -> None:
    """Perform consecutive waits, each with what is freed behind it: wait once for what arrives together, and cast it together."""
    registers, context = run.registers, run.context
    to_cast: list[int] = []
    over: set[Pending] = set()
    for number, step in enumerate(steps):
        gathered: GatherHandle = registers[step.handle]
        if gathered.pending is not None and gathered.pending not in over:
            context.finish(gathered.pending, gathered.what)
            over.add(gathered.pending)
        if gathered.dtype is None or gathered.stays is not None or gathered.full.device.type == "cpu":
            registers[step.out] = _full_of(gathered, context)
            del gathered
            run.free(frees[number])
        else:
            to_cast.append(number)
            del gathered
    over.clear()  # a transfer may hold what is about to be let go
    if to_cast:
        handles: list[GatherHandle] = [registers[steps[number].handle] for number in to_cast]
        arrived = tuple(handle.full.nbytes for handle in handles)
        cast = tuple(format_of(handle.dtype).bytes(handle.full.numel()) for handle in handles if handle.dtype is not None)
        del handles
        for batch in cast_order(arrived, cast):
            _cast_and_free([to_cast[i] for i in batch], steps, frees, run)


def _cast_and_free(numbers: Sequence[int], steps: Sequence[Wait], frees: Sequence[Sequence[int]], run: Run) -> None:
    registers = run.registers
    for dtype in dict.fromkeys(registers[steps[number].handle].dtype for number in numbers):
        own = [steps[number] for number in numbers if registers[steps[number].handle].dtype is dtype]
        fulls = _cast_together([registers[step.handle].full for step in own], dtype, run.context)
        for step, full in zip(own, fulls, strict=True):
            registers[step.out] = full
    for number in numbers:
        run.free(frees[number])


def _full_of(gathered: GatherHandle, context: Context) -> torch.Tensor:
    """Return the full unit of a gather that is over."""
    full = gathered.full
    if gathered.dtype is not None:
        full = _cast(full, gathered.dtype, context, stays=gathered.stays is not None)
    if gathered.stays is not None:
        context.full_copies.keep(gathered.stays, full)
    return full


def perform_keep_unit(step: KeepUnit, run: Run) -> None:
    """Save a full unit: a tensor of the same memory, which is compute's from now on, as other saved values."""
    with torch.inference_mode(False), torch.no_grad():
        run.registers[step.out] = run.registers[step.full].detach()


def perform_gather_rows(step: GatherRows, run: Run) -> None:
    unit = run.units[step.unit]
    assert isinstance(unit, Unit), "rows are those of the parameter"
    run.registers[step.out] = gather_rows(unit, run.registers[step.indices], run.program.name)


def _cast(value: torch.Tensor, dtype: torch.dtype, context: Context, *, stays: bool = False) -> torch.Tensor:
    if stays and value.device.type != "cpu":
        full = context.full_buffer(value.numel(), dtype, value.device).as_strided(value.size(), value.stride()).copy_(value)
        context.memory.ledger.track("gathered", full)
        return full
    (full,) = _cast_together([value], dtype, context)
    return full


def _cast_together(values: Sequence[torch.Tensor], dtype: torch.dtype, context: Context) -> list[torch.Tensor]:
    """Return full units in another type, in memory for gathers."""
    device = values[0].device
    if device.type == "cpu":
        fulls = [value.to(dtype) for value in values]
    else:
        buffers = context.gather_buffers([value.numel() for value in values], dtype, device)
        fulls = [buffer.as_strided(value.size(), value.stride()) for buffer, value in zip(buffers, values, strict=True)]
        torch._foreach_copy_(fulls, list(values))
    context.memory.ledger.track("gathered", *fulls)
    return fulls


def _gathering(step: Gather, members: Sequence[Unit | Tile], run: Run) -> str:
    return f"gathering {names_of(members)} (group {step.group}) in {run.program.name}"


def names_of(units: Sequence[Unit | Tile]) -> str:
    return units[0].name if len(units) == 1 else f"{units[0].name} .. {units[-1].name}"
