"""Perform a program's steps, in order, on the units bound to its slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from zinf_compile.ir.program import Gather, Program, Reduce, Region, Room, Rows, Sight, SwapIn, SwapOut, Wait
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.lanes.link_meter import moving
from zinf_compile.runtime.transfer.swap import Arriving, swap_in, swap_out
from zinf_compile.runtime.transfer.tiled_gradient import TileGradients
from zinf_compile.runtime.units.gather_rows import gather_rows
from zinf_compile.runtime.units.offloaded_gradient import AwayGradient
from zinf_compile.runtime.units.unit import Tile, Unit

from .context import Context

GradientMaker = Callable[[Unit, torch.Tensor | AwayGradient, Pending], torch.Tensor]

_DONE = Done()


class _Gathered:
    """A handle: the full unit, usable once `pending` is over; None where nothing travels."""

    __slots__ = ("dtype", "full", "pending", "what")

    def __init__(self, full: torch.Tensor, pending: Pending | None, what: str, dtype: torch.dtype | None = None) -> None:
        self.full = full
        self.pending = pending
        self.what = what
        self.dtype = dtype
        """As which the unit is wanted, where that is another than it arrives in."""


class _Reduced:
    """A gradient's shard, usable once `reduction` is over, before it is known where it will live."""

    __slots__ = ("reduction", "shard", "together", "unit")

    def __init__(
        self, unit: Unit | Tile, shard: torch.Tensor | AwayGradient, reduction: Pending, together: TileGradients | None = None
    ) -> None:
        self.unit = unit
        self.shard = shard
        self.reduction = reduction
        self.together = together
        """Of a tile's: the gradient that it is a part of."""


class Reduction:
    """A gradient's way to its shard; `wait` names graph and unit when it breaks."""

    __slots__ = ("_context", "_pending", "_what")

    def __init__(self, pending: Pending, context: Context, what: str) -> None:
        self._pending = pending
        self._context = context
        self._what = what

    def wait(self) -> None:
        """Return when the shard may be used."""
        self._context.finish(self._pending, self._what)


def execute(
    program: Program, units: Mapping[int, Unit | Tile], context: Context, args: list[Any], make_gradient: GradientMaker
) -> list[Any]:
    """Run the program on `args`, which is emptied; `units` fills its slots. Returns the graph's outputs."""
    context.lanes.meter.begin()
    registers: list[Any] = [None] * program.registers
    registers[: len(args)] = args
    args.clear()
    for register, value in program.constants.items():
        registers[register] = value
    tiled: dict[Unit, TileGradients] = {}
    leaves_for = {step.dst for step in program.steps if isinstance(step, SwapOut)} if program.tiles else set()
    for step, frees in zip(program.steps, program.frees, strict=True):
        if isinstance(step, Region):  # not `match`: it would cost as much again as all of this
            values = [registers[r] for r in step.inputs]
            for r in frees:
                registers[r] = None
            _store(registers, step.outputs, step.fn(values))
            continue
        if isinstance(step, Wait):
            gathered = registers[step.handle]
            if gathered.pending is not None:
                context.finish(gathered.pending, gathered.what)
            registers[step.out] = gathered.full if gathered.dtype is None else _cast(gathered, context)
            del gathered
        elif isinstance(step, Gather):
            _start_gather(program, step, units, registers, context)
        elif isinstance(step, Reduce):
            _start_reduce(program, step, units, registers, context, tiled, leaves_for)
        elif isinstance(step, Room):
            registers[step.out] = _room(units[step.unit], context, tiled, leaves_for)
        elif isinstance(step, Rows):
            looked_in = units[step.unit]
            assert isinstance(looked_in, Unit), "rows are those of the parameter"
            registers[step.out] = gather_rows(looked_in, registers[step.indices], program.name)
        elif isinstance(step, SwapIn):
            for source, out in step.members:
                earlier = registers[source] if isinstance(registers[source], Arriving) else None
                unit: Unit | Tile = units[source] if earlier is None else earlier.unit
                registers[out] = swap_in(unit, step.src, step.dst, earlier)
                del earlier
        elif isinstance(step, SwapOut):
            grad = registers[step.grad]
            take_out: Any = swap_out if grad.together is None else grad.together.take_out
            away, leaving = take_out(grad.unit, grad.shard, step.dst, grad.reduction)
            registers[step.out] = _Reduced(grad.unit, away, leaving, grad.together)
            del grad
        for r in frees:  # all there is to a release: the ledger notices when the memory goes
            registers[r] = None
    return [None if r is None else _result(registers, r, make_gradient) for r in program.outputs]


def _result(registers: Sequence[Any], place: int | tuple[int, ...], make_gradient: GradientMaker) -> Any:
    value = registers[place if isinstance(place, int) else place[0]]
    if not isinstance(place, int):
        return make_gradient(value.unit.unit, *value.together.whole())
    if type(value) is not _Reduced:
        return value
    assert isinstance(value.unit, Unit), "tiles' gradients are put together"
    return make_gradient(value.unit, value.shard, value.reduction)


def _cast(gathered: _Gathered, context: Context) -> torch.Tensor:
    full = gathered.full.to(gathered.dtype)
    context.memory.ledger.track("gathered", full)
    return full


def _store(registers: list[Any], places: Sequence[int], values: Sequence[Any]) -> None:
    """Put a region's results into their registers; nothing else holds them afterwards."""
    for place, value in zip(places, values, strict=True):
        registers[place] = value


def _start_gather(
    program: Program, step: Gather, units: Mapping[int, Unit | Tile], registers: list[Any], context: Context
) -> None:
    arriving = [registers[source] if isinstance(registers[source], Arriving) else None for source, _ in step.members]
    members = [units[source] if a is None else a.unit for (source, _), a in zip(step.members, arriving, strict=True)]
    what = f"gathering {_names(members)} (group {step.group}) in {program.name}"
    if context.size == 1:
        for unit, arrived, (_, out) in zip(members, arriving, step.members, strict=True):
            narrower = step.dtype if step.dtype != unit.dtype else None
            if arrived is not None:
                registers[out] = _Gathered(unit.logical(arrived.shard), arrived.pending, what, narrower)
            elif narrower is None:
                registers[out] = _Gathered(unit.whole(), None, what)
            else:
                registers[out] = _Gathered(_cast(_Gathered(unit.whole(), None, what, narrower), context), None, what)
        return
    shards = [unit.shard if a is None else a.shard for unit, a in zip(members, arriving, strict=True)]
    before = [a.pending for a in arriving if a is not None and a.pending is not None]
    context.memory.make_room(context.memory.ledger, sum(unit.numel for unit in members) * step.dtype.itemsize)
    flats = [context.gather_buffer(unit.numel, step.dtype, unit.device) for unit in members]
    parts = [unit.split(shard, flat) for unit, shard, flat in zip(members, shards, flats, strict=True)]
    count = (context.size - 1) * sum(shard.numel() for shard in shards) * step.dtype.itemsize

    def gather() -> None:
        for pending in before:
            pending.wait()
        with moving([context.lanes.meter], "from ranks", count):
            context.gathers.all_gather([s for own, _ in parts for s in own], [f for _, whole in parts for f in whole])

    pending = context.lanes.start(context.lanes.gather, gather)
    context.lanes.meter.moved("from ranks", count)
    for unit, (_, out), flat in zip(members, step.members, flats, strict=True):
        full = unit.logical(flat)
        context.memory.ledger.track("gathered", full)
        registers[out] = _Gathered(full, pending, what)


def _start_reduce(
    program: Program,
    step: Reduce,
    units: Mapping[int, Unit | Tile],
    registers: list[Any],
    context: Context,
    tiled: dict[Unit, TileGradients],
    leaves_for: Collection[str],
) -> None:
    members = [units[slot] for _, slot, _, _ in step.members]
    together = [_together(u, tiled, leaves_for) if isinstance(u, Tile) else None for u in members]
    if context.size == 1:
        for unit, whole, (grad, _, out, sight) in zip(members, together, step.members, strict=True):
            if whole is not None and whole.stays:
                value, shard = registers[grad], whole.room(unit, step.dtype)  # type: ignore[arg-type]
                if value.data_ptr() != shard.data_ptr():
                    shard.copy_(unit.flat(value))
                del value
            else:
                shard = _take_gradient(registers, grad, unit, step.dtype, sight, copy=sight != Sight.NOBODY)
                context.memory.ledger.track("grads", shard)
            registers[out] = _Reduced(unit, shard, _DONE, whole)
        return
    grads = _full_gradients(step, members, registers, context)
    shards = [
        grad.new_empty(unit.shard_numel) if whole is None else whole.room(unit, grad.dtype)  # type: ignore[arg-type]
        for unit, grad, whole in zip(members, grads, together, strict=True)
    ]
    parts = [unit.split(shard, grad) for unit, shard, grad in zip(members, shards, grads, strict=True)]
    held = sum(full.nbytes for full in grads)
    count = (context.size - 1) * sum(shard.nbytes for shard in shards)

    def reduce() -> None:
        try:
            with moving([context.lanes.meter], "to ranks", count):
                context.reductions.reduce_scatter([f for _, whole in parts for f in whole], [s for own, _ in parts for s in own])
        finally:
            if context.device.type == "cpu":  # a stream's transfer has only begun: it holds them until it is over
                grads.clear()
                parts.clear()
            context.memory.inflight_gradients.leave(held)

    with context.lanes.meter.waiting():
        try:
            pending = context.lanes.start(context.lanes.reduce, reduce)
        except BaseException:  # an interrupt while the lane is busy
            context.memory.inflight_gradients.leave(held)
            raise
    context.lanes.meter.moved("to ranks", count)
    what = f"reducing the gradients of {_names(members)} (group {step.group}) in {program.name}"
    reduction = Reduction(pending, context, what)
    for unit, (_, _, out, _), shard, whole in zip(members, step.members, shards, together, strict=True):
        if whole is None:
            context.memory.ledger.track("grads", shard)
        else:
            whole.reduced(reduction)
        registers[out] = _Reduced(unit, shard, reduction, whole)


def _full_gradients(step: Reduce, members: Sequence[Unit | Tile], registers: list[Any], context: Context) -> list[torch.Tensor]:
    """Return what a reduction sends, flat and in its type, once there is room for it on the way; that room is taken."""
    held = sum(unit.numel for unit in members) * step.dtype.itemsize
    values = [registers[grad] for grad, *_ in step.members]
    converted = sum(value.nbytes for value in values if value.dtype != step.dtype)  # there until it is cast
    del values
    with context.lanes.meter.waiting():
        context.memory.inflight_gradients.enter(held + converted)
    grads: list[torch.Tensor] = []
    try:
        for unit, (grad, _, _, sight) in zip(members, step.members, strict=True):
            grads.append(_take_gradient(registers, grad, unit, step.dtype, sight, copy=sight == Sight.CALLER))
            context.memory.ledger.track("staged", grads[-1])
    except BaseException:
        context.memory.inflight_gradients.leave(held)
        raise
    finally:
        if converted:
            context.memory.inflight_gradients.leave(converted)
    return grads


def _take_gradient(
    registers: list[Any], register: int, unit: Unit | Tile, dtype: torch.dtype, sight: Sight, *, copy: bool
) -> torch.Tensor:
    """Return a gradient flat and in `dtype`; what was cast is dropped, where nobody else sees it."""
    value = registers[register]
    if value.dtype == dtype:
        return _own(unit.flat(value), value, copy=copy)
    if sight == Sight.NOBODY:
        registers[register] = None
    return unit.flat(value).to(dtype)


def _room(tile: Unit | Tile, context: Context, tiled: dict[Unit, TileGradients], leaves_for: Collection[str]) -> torch.Tensor:
    """Return memory for a tile's gradient: where it will stay, if it is as it is reduced, and in that type."""
    assert isinstance(tile, Tile), "others' gradients are where they are computed"
    whole = _together(tile, tiled, leaves_for)
    if context.size == 1 and whole.stays and tile.reduce_dtype == tile.dtype:
        return tile.logical(whole.room(tile, tile.dtype))
    return torch.empty_strided(tile.shape, tile.stride, dtype=tile.dtype, device=tile.device)


def _together(tile: Tile, tiled: dict[Unit, TileGradients], leaves_for: Collection[str]) -> TileGradients:
    if tile.unit not in tiled:
        tiled[tile.unit] = TileGradients(tile.unit, leaves_for=leaves_for)
    return tiled[tile.unit]


def _own(flat: torch.Tensor, grad: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """Return `flat`, or where `copy` is needed and laying it out made none, a copy."""
    return flat.clone() if copy and flat.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr() else flat


def _names(units: Sequence[Unit | Tile]) -> str:
    return units[0].name if len(units) == 1 else f"{units[0].name} .. {units[-1].name}"
