"""Perform the steps that make full units: gathers, waits for them, lookups of rows, and units that are kept for the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.steps import Gather, GatherRows, KeepUnit, Wait
from zinf_compile.runtime.lanes.link_meter import moving
from zinf_compile.runtime.units.gather_rows import gather_rows
from zinf_compile.runtime.units.swap import SwapHandle, bring
from zinf_compile.runtime.units.unit import Tile, Unit

from .context import Context
from .handles import GatherHandle
from .run import Run


def perform_gather(step: Gather, run: Run) -> None:
    units, registers, context = run.units, run.registers, run.context
    if context.size == 1:
        _gather_at_hand(step, run)
        return
    first = registers[step.members[0][0]]
    group = (first.unit if isinstance(first, SwapHandle) else units[step.members[0][0]]).shard_group
    if group.size == 1:
        _gather_at_hand(step, run)
        return
    arriving = [_arriving(source, run) for source, _ in step.members]
    members = [units[source] if a is None else a.unit for (source, _), a in zip(step.members, arriving, strict=True)]
    gathers, _ = context.collectives(group)
    what = _gathering(step, members, run)
    shards = [unit.shard if a is None else a.shard for unit, a in zip(members, arriving, strict=True)]
    following = (unit.updated() if a is None else a.pending for unit, a in zip(members, arriving, strict=True))
    before = [pending for pending in following if pending is not None]
    context.memory.make_room(context.memory.ledger, format_of(step.dtype).bytes(sum(unit.numel for unit in members)))
    flats = [
        # what autograd keeps is PyTorch's memory, and none of the arena that gathers share
        (context.full_buffer if out in run.program.kept else context.gather_buffer)(unit.numel, step.dtype, unit.device)
        for unit, (_, out) in zip(members, step.members, strict=True)
    ]
    parts = [unit.split(shard, flat) for unit, shard, flat in zip(members, shards, flats, strict=True)]
    count = (group.size - 1) * format_of(step.dtype).bytes(sum(shard.numel() for shard in shards))

    def gather() -> None:
        with moving([context.lanes.meter], "from ranks", count, what):
            gathers.all_gather([s for own, _ in parts for s in own], [f for _, whole in parts for f in whole])

    pending = context.lanes.start(context.lanes.gather, gather, after=before)
    context.lanes.meter.moved("from ranks", count)
    for unit, (_, out), flat in zip(members, step.members, flats, strict=True):
        full = unit.logical(flat)
        context.memory.ledger.track("gathered", full)
        registers[out] = GatherHandle(full, pending, what)


def _arriving(source: int, run: Run) -> SwapHandle | None:
    """Return the swap of a unit that is about to be gathered, begun now if the graph has none; None where it is on the device."""
    value = run.registers[source]
    if isinstance(value, SwapHandle):
        return value
    unit = run.units[source]
    return None if unit.backing is None else bring(unit)


def _gather_at_hand(step: Gather, run: Run) -> None:
    """Gather units that are not cut into shards: the shard, on the device or in flight to it, is the whole."""
    units, registers = run.units, run.registers
    for source, out in step.members:
        arrived = _arriving(source, run)
        if arrived is not None and arrived.unit.backing is not None:
            narrower = step.dtype if step.dtype != arrived.unit.dtype else None
            full = arrived.unit.logical(arrived.shard)
            registers[out] = GatherHandle(full, arrived.pending, _gathering(step, [arrived.unit], run), narrower)
        else:
            unit = units[source] if arrived is None else arrived.unit
            whole, updated = unit.whole_memory(), unit.updated()
            if updated is not None or step.dtype == unit.dtype:
                narrower = step.dtype if step.dtype != unit.dtype else None
                registers[out] = GatherHandle(whole, updated, _gathering(step, [unit], run), narrower)
            else:
                registers[out] = GatherHandle(_cast(whole, step.dtype, run.context), None)


def perform_wait(step: Wait, run: Run) -> None:
    gathered = run.registers[step.handle]
    if gathered.pending is not None:
        run.context.finish(gathered.pending, gathered.what)
    run.registers[step.out] = gathered.full if gathered.dtype is None else _cast(gathered.full, gathered.dtype, run.context)


def perform_keep_unit(step: KeepUnit, run: Run) -> None:
    """Save a full unit: a tensor of the same memory, which is compute's from now on, as other saved values."""
    with torch.inference_mode(False), torch.no_grad():
        run.registers[step.out] = run.registers[step.full].detach()


def perform_gather_rows(step: GatherRows, run: Run) -> None:
    unit = run.units[step.unit]
    assert isinstance(unit, Unit), "rows are those of the parameter"
    run.registers[step.out] = gather_rows(unit, run.registers[step.indices], run.program.name)


def _cast(value: torch.Tensor, dtype: torch.dtype, context: Context) -> torch.Tensor:
    if value.device.type == "cpu":
        full = value.to(dtype)
    else:
        full = context.gather_buffer(value.numel(), dtype, value.device).as_strided(value.size(), value.stride()).copy_(value)
    context.memory.ledger.track("gathered", full)
    return full


def _gathering(step: Gather, members: Sequence[Unit | Tile], run: Run) -> str:
    return f"gathering {names_of(members)} (group {step.group}) in {run.program.name}"


def names_of(units: Sequence[Unit | Tile]) -> str:
    return units[0].name if len(units) == 1 else f"{units[0].name} .. {units[-1].name}"
