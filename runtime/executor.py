"""Perform a program's steps, in order, on the units bound to its slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import (
    Gather,
    GatherRows,
    GradAlias,
    KeepUnit,
    Reduce,
    ReduceBuffer,
    Region,
    Release,
    SwapIn,
    SwapOut,
    Wait,
)
from zinf_compile.ir.tiers import Tier
from zinf_compile.ir.value_steps import CopyValue, DropValue, RandomState, SetRandomState, SwapValuesIn, SwapValuesOut, WaitValue
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.lanes.link_meter import moving
from zinf_compile.runtime.lanes.step_recorder import GraphRecorder
from zinf_compile.runtime.lanes.stream_lane import StreamLane, StreamTransfer
from zinf_compile.runtime.memory.handed_on import HandedOn
from zinf_compile.runtime.memory.leaving_norms import Taking
from zinf_compile.runtime.storage.value_space import ValueSpace
from zinf_compile.runtime.units.offloaded_gradient import OffloadedGradient
from zinf_compile.runtime.units.unit import Tile, Unit
from zinf_compile.runtime.units.whole_gradient import keep_whole

from .context import Context
from .gather_steps import (
    names_of,
    perform_gather,
    perform_gather_rows,
    perform_keep_unit,
    perform_wait,
    perform_waits,
)
from .handles import ReduceHandle, Reduction, unit_and_tile
from .run import Run
from .swap_steps import hop_out, perform_swap_in, perform_swap_out
from .value_steps import (
    perform_copy,
    perform_drop,
    perform_random_state,
    perform_set_random_state,
    perform_swap_values_in,
    perform_swap_values_out,
    perform_wait_value,
)

GradientMaker = Callable[[Unit, torch.Tensor | OffloadedGradient, Pending], torch.Tensor]

_DONE = Done()


def execute(
    program: Program,
    units: Mapping[int, Unit | Tile],
    context: Context,
    args: list[Any],
    make_gradient: GradientMaker,
    *,
    space: ValueSpace | None = None,
    handed: HandedOn | None = None,
) -> list[Any]:
    """Run the program on `args`, which is emptied; `units` fills its slots. Returns the graph's outputs.

    `space`: where saved values go that leave for a drive. `handed`: what a forward leaves on the device for its backward.
    """
    context.lanes.meter.begin()
    recorder = None if (recording := context.lanes.meter.recorder) is None else recording.graph(program)
    run = Run(program, units, context, args, space, handed)
    args.clear()
    registers = run.registers
    try:
        _perform(run, recorder)
    except BaseException:
        run.put_random_states_back()
        raise
    if recorder is not None:
        recorder.over()
    return [None if r is None else _result(registers, r, make_gradient) for r in program.outputs]


def _perform(run: Run, recorder: GraphRecorder | None) -> None:
    program, registers, memory = run.program, run.registers, run.context.memory
    steps, frees = program.steps, program.frees
    for start, end in program.runs if recorder is None else enumerate(range(1, len(steps) + 1)):
        step, freed = steps[start], frees[start]
        if memory.lets_leave and not isinstance(step, SwapIn):  # what else takes memory does so behind this
            memory.let_leave()
        if isinstance(step, Region):
            values = [registers[r] for r in step.inputs]
            for r in freed:
                registers[r] = None
            _store(registers, step.outputs, step.fn(values) if recorder is None else recorder.compute(step, values), freed)
            continue
        if end - start > 1:
            perform_waits(steps[start:end], frees[start:end], run)  # type: ignore[arg-type]
            continue
        if recorder is None:
            PERFORM[type(step)](step, run)
        else:
            recorder.perform(PERFORM[type(step)], step, run)
        for r in freed:
            registers[r] = None


def _result(registers: Sequence[Any], place: int | tuple[int, ...], make_gradient: GradientMaker) -> Any:
    value = registers[place if isinstance(place, int) else place[0]]
    if not isinstance(place, int):
        return make_gradient(value.unit.unit, *value.together.whole())
    if type(value) is not ReduceHandle:
        return value
    assert isinstance(value.unit, Unit), "tiles' gradients are put together"
    return make_gradient(value.unit, value.shard, value.reduction)


def _store(registers: list[Any], places: Sequence[int], values: Sequence[Any], unread: Sequence[int]) -> None:
    """Put a region's results into their registers, but for those that nothing reads; nothing else holds them afterwards."""
    for place, value in zip(places, values, strict=True):
        if place not in unread:
            registers[place] = value


def _release(step: Release, run: Run) -> None:
    """Let a backward have what it finds. The register is freed after the step, and the ledger notices."""
    if run.handed is None or run.handed.shards or (slot := run.program.ends.get(step.full)) is None:
        return
    unit, full = run.units[slot], run.registers[step.full]
    if (run.program.key_of(slot), full.dtype) in run.handed.wanted and unit.backing is not None:
        owner, tile = unit_and_tile(unit)
        run.context.full_copies.hand_on(owner, full, tile=tile)


def _take_home(grad: ReduceHandle, slot: int, run: Run) -> ReduceHandle:
    """Start all hops of a gradient whose unit lives farther away than the graph takes it; else return it as it is."""
    home, program = grad.unit.placement.grads, run.program
    if home == Tier.DEVICE:
        return grad
    planned = Tier(program.leaves.get(program.tiles[slot][0] if slot in program.tiles else slot, Tier.DEVICE))
    path = run.context.link.topology.hops(home) if planned.distance < home.distance else ()
    for dst in path[-2::-1]:
        grad = hop_out(grad, dst)
    grad.at_home = bool(path)
    return grad


def _reduce(step: Reduce, run: Run) -> None:
    registers, context = run.registers, run.context
    members = [run.units[slot] for _, slot, _, _ in step.members]
    group = members[0].shard_group
    if group.size == 1:
        _reduce_at_hand(step, members, run)
        return
    together = [run.gradient_of(u) if isinstance(u, Tile) else None for u in members]
    if step.at_step:
        _keep_until_step(step, members, run)
        return
    _, reductions = context.collectives(group)
    grads = _full_gradients(step, members, registers, context)
    held = sum(full.nbytes for full in grads)
    what = f"reducing the gradients of {names_of(members)} (group {step.group}) in {run.program.name}"
    parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    taking: Taking | None = None

    def reduce() -> None:
        with moving([context.lanes.meter], "to ranks", count, what):
            reductions.reduce_scatter([f for _, whole in parts for f in whole], [s for own, _ in parts for s in own])
        if taking is not None:
            taking.take()

    def ended() -> None:
        if not isinstance(context.lanes.reduce, StreamLane):  # there it has only begun: it holds them until it is over
            grads.clear()
            parts.clear()
            context.memory.inflight_gradients.release(held)

    try:
        shards = [
            grad.new_empty(unit.shard_numel) if whole is None else whole.reduce_buffer(unit, grad.dtype)  # type: ignore[arg-type]
            for unit, grad, whole in zip(members, grads, together, strict=True)
        ]
        taking = _norms_to_take(members, shards, context)
        parts += [unit.split(shard, grad) for unit, shard, grad in zip(members, shards, grads, strict=True)]
        count = (group.size - 1) * sum(shard.nbytes for shard in shards)
        with context.lanes.meter.waiting():
            pending = context.lanes.start(context.lanes.reduce, reduce, ended=ended)
        if isinstance(pending, StreamTransfer):
            context.memory.inflight_gradients.follow(pending, held)
    except BaseException:  # no memory, or an interrupt while the lane is busy
        context.memory.inflight_gradients.release(held)
        raise
    context.lanes.meter.moved("to ranks", count)
    reduction = Reduction(pending, context, what)
    if taking is not None:
        taking.behind(reduction)
    for unit, (_, slot, out, _), shard, whole in zip(members, step.members, shards, together, strict=True):
        if whole is None:
            context.memory.ledger.track("grads", shard)
        else:
            whole.reduced(reduction)
        registers[out] = _take_home(ReduceHandle(unit, shard, reduction, whole), slot, run)


def _norms_to_take(members: Sequence[Unit | Tile], shards: Sequence[torch.Tensor], context: Context) -> Taking | None:
    """Return the norms of those that are about to leave the device."""
    if not context.leaving_norms.are_wanted:
        return None
    rows = zip(members, shards, strict=True)
    return context.leaving_norms.begin([(unit, shard) for unit, shard in rows if unit.placement.grads != Tier.DEVICE])


def _reduce_at_hand(step: Reduce, members: Sequence[Unit | Tile], run: Run) -> None:
    """Take the gradients of units that are not cut into shards: each as it is."""
    registers, ledger = run.registers, run.context.memory.ledger
    staying: list[torch.Tensor] = []
    try:
        for unit, (grad, slot, out, alias) in zip(members, step.members, strict=True):
            whole = run.gradient_of(unit) if isinstance(unit, Tile) else None
            if whole is not None and whole.on_device:
                value, shard = registers[grad], whole.reduce_buffer(unit, step.dtype)  # type: ignore[arg-type]
                if value.data_ptr() != shard.data_ptr():
                    shard.copy_(unit.flat(value))
                del value
            else:
                shard = _take_gradient(registers, grad, unit, step.dtype, alias, copy=alias is not GradAlias.NOBODY)
                if unit.placement.grads == Tier.DEVICE:
                    staying.append(shard)
                else:  # before it leaves
                    ledger.track("grads", shard)
            if (taking := _norms_to_take([unit], [shard], run.context)) is not None:
                taking.take()
            registers[out] = _take_home(ReduceHandle(unit, shard, _DONE, whole), slot, run)
    finally:
        ledger.track("grads", *staying)


def _keep_until_step(step: Reduce, members: Sequence[Unit | Tile], run: Run) -> None:
    for unit, (grad, _, out, alias) in zip(members, step.members, strict=True):
        assert isinstance(unit, Unit), "tiles are reduced where they are made"
        full = _take_gradient(run.registers, grad, unit, step.dtype, alias, copy=alias != GradAlias.NOBODY)
        kept = keep_whole(unit, full)
        run.registers[out] = ReduceHandle(unit, kept.shard, kept)


def _full_gradients(step: Reduce, members: Sequence[Unit | Tile], registers: list[Any], context: Context) -> list[torch.Tensor]:
    """Return the flat gradients that a reduction sends, in its type, within the limit of those under way."""
    held = format_of(step.dtype).bytes(sum(unit.numel for unit in members))
    values = [registers[grad] for grad, *_ in step.members]
    converted = sum(value.nbytes for value in values if value.dtype != step.dtype)  # there until it is cast
    del values
    with context.lanes.meter.waiting():
        context.memory.inflight_gradients.acquire(held + converted)
    grads: list[torch.Tensor] = []
    try:
        for unit, (grad, _, _, alias) in zip(members, step.members, strict=True):
            grads.append(_take_gradient(registers, grad, unit, step.dtype, alias, copy=alias == GradAlias.CALLER))
            context.memory.ledger.track("staging", grads[-1])
    except BaseException:
        context.memory.inflight_gradients.release(held)
        raise
    finally:
        if converted:
            context.memory.inflight_gradients.release(converted)
    return grads


def _take_gradient(
    registers: list[Any], register: int, unit: Unit | Tile, dtype: torch.dtype, alias: GradAlias, *, copy: bool
) -> torch.Tensor:
    """Return a gradient flat and in `dtype`; what was cast is dropped, where nobody else sees it."""
    value = registers[register]
    if value.dtype == dtype:
        flat = unit.flat(value)
        return _own(flat, value) if copy else flat
    if alias == GradAlias.NOBODY:
        registers[register] = None
    return unit.flat(value).to(dtype)


def _reduce_buffer(step: ReduceBuffer, run: Run) -> None:
    """Take memory for a tile's gradient: where it will stay, if it is as it is reduced, and in that type."""
    tile = run.units[step.unit]
    assert isinstance(tile, Tile), "others' gradients are where they are computed"
    whole = run.gradient_of(tile)
    if tile.shard_group.size == 1 and whole.on_device and tile.reduce_dtype == tile.dtype:
        run.registers[step.out] = tile.logical(whole.reduce_buffer(tile, tile.dtype))
    else:
        run.registers[step.out] = torch.empty_strided(tile.shape, tile.stride, dtype=tile.dtype, device=tile.device)


def _own(flat: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return `flat`, or a copy where laying it out made none."""
    return flat.clone() if flat.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr() else flat


PERFORM: dict[type, Callable[[Any, Run], None]] = {
    SwapIn: perform_swap_in,
    SwapOut: perform_swap_out,
    Gather: perform_gather,
    GatherRows: perform_gather_rows,
    SwapValuesIn: perform_swap_values_in,
    SwapValuesOut: perform_swap_values_out,
    Wait: perform_wait,
    WaitValue: perform_wait_value,
    DropValue: perform_drop,
    CopyValue: perform_copy,
    RandomState: perform_random_state,
    SetRandomState: perform_set_random_state,
    Release: _release,
    KeepUnit: perform_keep_unit,
    ReduceBuffer: _reduce_buffer,
    Reduce: _reduce,
}
"""The function of each kind of step, but for a region, which the loop calls itself. (A `match` would cost as much again.)"""
