"""Saving of an optimizer's full states: gathered on rank 0 in the format of eager's `state_dict()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import tree_leaves, tree_map
from zinf_compile.errors import BudgetError, UnsupportedOptimizerError
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import digest_of
from zinf_compile.optim.shard_state import shard_state
from zinf_compile.optim.split_states import split_units
from zinf_compile.optim.state_entry import in_memory
from zinf_compile.optim.state_layout import without_note
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.comm.steps_done import mixed
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.steps_taken import describe_steps, digest_of_steps
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.arguments import check_optimizer
from zinf_compile.sharded.host_shortage import host_shortage
from zinf_compile.sharded.parameter import unit_of

from .gathered import gathered_on_first


def full_optimizer_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return eager's `optimizer.state_dict()`, on the host of rank 0, with full states; other ranks get an empty one.

    A collective operation. States have the shapes of their parameters, so that it loads into the same optimizer of the plain
    model, and by `load_full_optimizer_state_dict` on any number of ranks, under any tiers and tiles. Needs host memory for all
    states on rank 0, and on every rank for its own shards of them, which are read as for `optimizer.state_dict()`; raises
    `BudgetError` if there is less.
    """
    units, context = units_of(optimizer)
    if context is None:
        return _copied(optimizer.state_dict(), optimizer)
    ranks = ranks_of(units)
    with ranks.fail_together("saving the optimizer"):
        given = optimizer.state_dict()
        states = {key: without_note(state) if isinstance(state, Mapping) else state for key, state in given.pop("state").items()}
        gathered = dict(large_states(states, units))
        _reject_nested(optimizer, states, units)
        shards = {(key, name): shard_state(states[key][name], unit, name, optimizer) for (key, name), unit in gathered.items()}
        whole = sum(format_of(shards[place].dtype).bytes(unit.numel) for place, unit in gathered.items())
        held = _held(optimizer)
        freed = sum(shards[key, name].nbytes for key, name in gathered if id(states[key][name]) not in held)  # freed again below
        if ranks.rank == 0 and (short := host_shortage(context, whole - freed)):
            raise BudgetError(
                f"the whole states of this {type(optimizer).__name__} take {whole:,} bytes of host memory on rank 0; "
                f"{short.available:,} are available, and {freed:,} that become free. {short.named}. "
                "Or save each rank's own, by optimizer.state_dict()"
            )
    agree_on_order(
        units,
        "saving the optimizer",
        [f"{n} of {u.name} {shards[k, n].dtype}" for (k, n), u in gathered.items()],
        compare_steps=True,
    )
    for (key, name), unit in gathered.items():
        states[key][name] = None  # frees the shard once it is gathered
        shard = shards.pop((key, name)).to(unit.device)
        found = gathered_on_first(unit, shard, f"gathering state {name} of {unit.name} on rank 0")
        states[key][name] = None if found is None else found.to("cpu")
    return _copied({"state": states, **given}, optimizer) if ranks.rank == 0 else {}


def units_of(optimizer: Optimizer) -> tuple[list[Unit | None], Context | None]:
    """Return the units of an optimizer's parameters in the order in which a state dict numbers them, and their context.

    None in place of a unit: the parameter isn't partitioned, and its states aren't split.
    """
    check_optimizer(optimizer)
    split = split_units(optimizer)
    units = [unit_of(p) or split.get(p) for group in optimizer.param_groups for p in group["params"]]
    return units, next((unit.context for unit in units if unit is not None), None)


def ranks_of(units: Sequence[Unit | None]) -> Ranks:
    """Return the ranks over which an optimizer's units are partitioned. At least one of `units` is one."""
    return next(unit.ranks for unit in units if unit is not None)


def large_states(states: Mapping[Any, Any], units: list[Unit | None]) -> Iterator[tuple[tuple[int, str], Unit]]:
    """Yield (parameter number, state name) and unit of states of a parameter's size, in the same order on all ranks."""
    for key, unit in enumerate(units):
        for name, value in sorted(states.get(key, {}).items()) if unit is not None else ():
            shape = getattr(value, "shape", ())
            if unit is not None and shape and (shape.numel() != 1 or unit.numel == 1 or unit.shard_numel == 1):
                yield (key, name), unit


def agree_on_order(units: list[Unit | None], what: str, more: list[str], *, compare_steps: bool) -> None:
    """Check that all ranks number the same parameters alike, and that these went through the same steps."""
    named = [f"parameter {i} is {'whole' if unit is None else f'unit {unit.serial}'}" for i, unit in enumerate(units)]
    lines, stepped = [*named, *more], [unit for unit in units if unit is not None] if compare_steps else []
    digest = mixed(digest_of(lines), digest_of_steps(stepped))
    ranks_of(units).agree(lines, what=what, digest=digest, details=lambda: describe_steps(stepped))


def _reject_nested(optimizer: Optimizer, states: Mapping[Any, Any], units: list[Unit | None]) -> None:
    for key, unit in enumerate(units):
        for name, value in states.get(key, {}).items() if unit is not None else ():
            if not isinstance(value, torch.Tensor) and any(isinstance(v, torch.Tensor) and v.dim() for v in tree_leaves(value)):
                raise UnsupportedOptimizerError(
                    f"state {name!r} of {type(optimizer).__name__} is a {type(value).__name__} of tensors: a rank has its own "
                    "shards of these, and only states that are tensors can be gathered. Save optimizer.state_dict() on each rank"
                )


def _copied(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a state dict whose tensors are unshared and on the host; only those that the optimizer holds are copied."""
    held = _held(optimizer)

    def copied(value: Any) -> Any:
        return value.detach().to("cpu", copy=id(value) in held) if isinstance(value, torch.Tensor) else value

    states = {
        key: tree_map(copied, dict(entry) if isinstance(entry, Mapping) else entry) for key, entry in state["state"].items()
    }
    groups = tree_map(lambda v: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v, state["param_groups"])
    return {**state, "state": states, "param_groups": groups}


def _held(optimizer: Optimizer) -> set[int]:
    """Return the ids of the values in `optimizer.state`."""
    return {id(value) for entry in optimizer.state.values() for value in tree_leaves(_plain(entry))}


def _plain(entry: Any) -> Any:
    return dict(in_memory(entry)) if isinstance(entry, Mapping) else entry
