"""The callable that AOTAutograd runs in the place of one scheduled graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from zinf_compile._torch import inside_ddp
from zinf_compile.errors import StoreError
from zinf_compile.ir.program import Program
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.executor import execute
from zinf_compile.runtime.memory.activations import storages_of
from zinf_compile.runtime.memory.handed_on import HandedOn
from zinf_compile.runtime.units.unit import Tile, Unit
from zinf_compile.runtime.units.updatable import why_unread
from zinf_compile.sharded.call_checks import CallChecks
from zinf_compile.sharded.compute_budget import maker_of
from zinf_compile.sharded.gradient import ShardedGradient

from .kept_graphs import LiveProgram
from .saved_values import SavedSpace
from .wrappers import wrapped_in


def runner(
    live: LiveProgram,
    context: Context,
    saved: SavedSpace,
    checks: CallChecks,
    *,
    makes_gradients: bool,
    results: int | None,
    handed: HandedOn | None,
    takes: bool,
) -> Callable[[list[Any]], list[Any]]:
    """Return what binds the arguments of a call and performs the program.

    `handed`: what it leaves for its backward; None: nothing. `takes`: whether it is one, which finds what its forward has left.
    `results`: of its outputs, the number that the caller gets, the rest are saved for the backward; None: all.
    The other ranks are told of an error, so that none waits for this one.
    """
    ranks = weakref.ref(context.ranks)  # a closed context lets go of them, and a compiled model may outlive it

    def run(args: list[Any]) -> list[Any]:
        if inside_ddp():  # wrapped after this graph was compiled
            raise wrapped_in(DistributedDataParallel)
        units: Mapping[int, Unit | Tile] = {}
        try:
            if not takes:
                context.full_copies.end_handed_on()
            context.memory.begin_graph(makes_gradients=makes_gradients)
            now, (space, lack_of_space) = live.program, saved.reserve()
            units = live.binder.bind(args, lacks_space=lack_of_space)
            if takes:
                context.full_copies.end_handed_on(partial(_found_by, now, units))
            context.memory.trim_arena()  # the check has seen what others have taken
            given = storages_of(args) if checks.counts else None
            returned = execute(now, units, context, args, ShardedGradient, space=space, handed=handed)
            if given is not None:
                maker = maker_of(units.values())
                own = checks.reservations
                context.memory.activations.add(
                    returned, context.device, given=given, results=results, maker=maker, reservations=own
                )
            return returned
        except BaseException as error:
            failed = None
            if isinstance(error, StoreError):
                failed = why_unread(unit for unit in units.values() if isinstance(unit, Unit))
            if (others := ranks()) is not None:
                others.tell(failed or error)
            if failed is not None:
                raise failed from error
            raise

    run._boxed_call = True  # type: ignore[attr-defined]  # tells AOTAutograd that `run` takes a list and empties it
    return run


def _found_by(program: Program, units: Mapping[int, Unit | Tile]) -> list[Unit | Tile]:
    """Return the units, and tiles, that a program finds on the device if the one before has left them there."""
    found = {key for key, _ in program.finds}
    return [unit for register, unit in units.items() if program.key_of(register) in found]
