"""Perform a program's steps, in order, on the units bound to its slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zinf_compile.program import Gather, Program, Reduce, Region, Release, Sight, Wait

from .context import Context
from .lanes import Done, Pending
from .partition import shard_numel
from .unit import Unit

GradientMaker = Callable[[Unit, torch.Tensor, Pending], torch.Tensor]


class _Gathered:
    """A handle: the full unit, usable once `pending` is over."""

    __slots__ = ("full", "pending", "what")

    def __init__(self, full: torch.Tensor, pending: Pending, what: str) -> None:
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
        match step:
            case Region(fn, inputs, outputs):
                values = [registers[r] for r in inputs]
                for r in frees:
                    registers[r] = None
                _store(registers, outputs, fn(values))
                continue
            case Wait(handle, out):
                gathered = registers[handle]
                context.finish(gathered.pending, gathered.what)
                registers[out] = gathered.full
                del gathered
            case Release():
                pass  # the register is freed below; the ledger notices when the memory goes
            case Gather(group, members, dtype):
                _start_gather(program, group, [(units[unit], out) for unit, out in members], dtype, registers, context)
            case Reduce(group, reductions):
                _start_reduce(
                    program, group, [(registers[g], units[u], out, sight) for g, u, out, sight in reductions],
                    registers, context, make_gradient=make_gradient,
                )  # fmt: skip
        for r in frees:
            registers[r] = None
    return [None if r is None else registers[r] for r in program.outputs]


def _store(registers: list[Any], places: Sequence[int], values: Sequence[Any]) -> None:
    """Put a region's results into their registers; nothing else holds them afterwards."""
    for place, value in zip(places, values, strict=True):
        registers[place] = value


def _start_gather(
    program: Program,
    group: int,
    members: Sequence[tuple[Unit, int]],
    dtype: torch.dtype,
    registers: list[Any],
    context: Context,
) -> None:
    if context.size == 1:
        for unit, out in members:
            full = unit.whole()
            if dtype != unit.dtype:
                full = full.to(dtype)
                context.ledger.track("gathered", full)
            registers[out] = _Gathered(full, Done(), "")
        return
    shards = [unit.shard for unit, _ in members]
    flats = [context.full_buffer(unit.numel, dtype, unit.device) for unit, _ in members]
    pending = context.start(context.gather_lane, lambda: context.gathers.all_gather(shards, flats))
    what = f"gathering {_names([unit for unit, _ in members])} (group {group}) in {program.name}"
    for (unit, out), flat in zip(members, flats, strict=True):
        full = unit.logical(flat)
        context.ledger.track("gathered", full)
        registers[out] = _Gathered(full, pending, what)


def _start_reduce(
    program: Program,
    group: int,
    members: Sequence[tuple[torch.Tensor, Unit, int, Sight]],
    registers: list[Any],
    context: Context,
    *,
    make_gradient: GradientMaker,
) -> None:
    if context.size == 1:
        for grad, unit, out, sight in members:
            shard = _own(unit.flat(grad), grad, copy=sight != Sight.NOBODY)
            context.ledger.track("grads", shard)
            registers[out] = make_gradient(unit, shard, Done())
        return
    grads = [_own(unit.flat(grad), grad, copy=sight == Sight.CALLER) for grad, unit, _, sight in members]
    shards = [grad.new_empty(shard_numel(grad.numel(), context.size)) for grad in grads]
    pending = context.start(context.reduce_lane, lambda: context.reductions.reduce_scatter(grads, shards))
    what = f"reducing the gradients of {_names([unit for _, unit, _, _ in members])} (group {group}) in {program.name}"
    reduction = Reduction(pending, context, what)
    for (_, unit, out, _), shard in zip(members, shards, strict=True):
        context.ledger.track("grads", shard)
        registers[out] = make_gradient(unit, shard, reduction)


def _own(flat: torch.Tensor, grad: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """Return `flat`, or where `copy` is needed and laying it out made none, a copy."""
    return flat.clone() if copy and flat.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr() else flat


def _names(units: Sequence[Unit]) -> str:
    return units[0].name if len(units) == 1 else f"{units[0].name} .. {units[-1].name}"
