"""Perform a program's steps, in order, on the units bound to its slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zinf_compile.program import Gather, Program, Reduce, Region, Sight, Wait

from .context import Context
from .lanes import Done, Pending
from .partition import shard_numel
from .unit import Unit

GradientMaker = Callable[[Unit, torch.Tensor, Pending], torch.Tensor]

_DONE = Done()


class _Gathered:
    """A handle: the full unit, usable once `pending` is over; None where nothing travels."""

    __slots__ = ("full", "pending", "what")

    def __init__(self, full: torch.Tensor, pending: Pending | None, what: str) -> None:
        self.full = full
        self.pending = pending
        self.what = what


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
    program: Program, units: Mapping[int, Unit], context: Context, args: list[Any], make_gradient: GradientMaker
) -> list[Any]:
    """Run the program on `args`, which is emptied; `units` fills its slots. Returns the graph's outputs."""
    registers: list[Any] = [None] * program.registers
    registers[: len(args)] = args
    args.clear()
    for register, value in program.constants.items():
        registers[register] = value
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
            registers[step.out] = gathered.full
            del gathered
        elif isinstance(step, Gather):
            _start_gather(program, step, units, registers, context)
        elif isinstance(step, Reduce):
            _start_reduce(program, step, units, registers, context, make_gradient=make_gradient)
        for r in frees:  # all there is to a release: the ledger notices when the memory goes
            registers[r] = None
    return [None if r is None else registers[r] for r in program.outputs]


def _store(registers: list[Any], places: Sequence[int], values: Sequence[Any]) -> None:
    """Put a region's results into their registers; nothing else holds them afterwards."""
    for place, value in zip(places, values, strict=True):
        registers[place] = value


def _start_gather(program: Program, step: Gather, units: Mapping[int, Unit], registers: list[Any], context: Context) -> None:
    if context.size == 1:
        for slot, out in step.members:
            full = units[slot].whole()
            if full.dtype != step.dtype:
                full = full.to(step.dtype)
                context.ledger.track("gathered", full)
            registers[out] = _Gathered(full, None, "")
        return
    members = [units[slot] for slot, _ in step.members]
    shards = [unit.shard for unit in members]
    flats = [context.gather_buffer(unit.numel, step.dtype, unit.device) for unit in members]
    pending = context.start(context.gather_lane, lambda: context.gathers.all_gather(shards, flats))
    what = f"gathering {_names(members)} (group {step.group}) in {program.name}"
    for unit, (_, out), flat in zip(members, step.members, flats, strict=True):
        full = unit.logical(flat)
        context.ledger.track("gathered", full)
        registers[out] = _Gathered(full, pending, what)


def _start_reduce(
    program: Program,
    step: Reduce,
    units: Mapping[int, Unit],
    registers: list[Any],
    context: Context,
    *,
    make_gradient: GradientMaker,
) -> None:
    if context.size == 1:
        for grad, slot, out, sight in step.members:
            unit, value = units[slot], registers[grad]
            shard = _own(unit.flat(value), value, copy=sight != Sight.NOBODY)
            context.ledger.track("grads", shard)
            registers[out] = make_gradient(unit, shard, _DONE)
        return
    members = [units[slot] for _, slot, _, _ in step.members]
    grads = [
        _own(unit.flat(registers[grad]), registers[grad], copy=sight == Sight.CALLER)
        for unit, (grad, _, _, sight) in zip(members, step.members, strict=True)
    ]
    shards = [grad.new_empty(shard_numel(grad.numel(), context.size)) for grad in grads]
    pending = context.start(context.reduce_lane, lambda: context.reductions.reduce_scatter(grads, shards))
    what = f"reducing the gradients of {_names(members)} (group {step.group}) in {program.name}"
    reduction = Reduction(pending, context, what)
    for unit, (_, _, out, _), shard in zip(members, step.members, shards, strict=True):
        context.ledger.track("grads", shard)
        registers[out] = make_gradient(unit, shard, reduction)


def _own(flat: torch.Tensor, grad: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """Return `flat`, or where `copy` is needed and laying it out made none, a copy."""
    return flat.clone() if copy and flat.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr() else flat


def _names(units: Sequence[Unit]) -> str:
    return units[0].name if len(units) == 1 else f"{units[0].name} .. {units[-1].name}"
