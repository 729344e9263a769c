"""Loads an optimizer's states to where it keeps them, piece by piece, in an order that is known before the first is read.

Called by `checkpoint`, which reads them.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.optim import Optimizer

from zinf_compile.errors import UnsupportedOptimizerError
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.units.shard_values import pieces_of
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import MASTER, part_of
from .closure_step import hollow_of
from .deferred_step import finish_deferred
from .elementwise_probe import states_kept
from .offloaded_states import OffloadedStates
from .precision import SHORT
from .record import record_of, take_last_step
from .shard_state import kept_state
from .split_states import split_units
from .state_accounts import account_states, check_states_to_come
from .state_dict_hooks import offloaded_states
from .state_layout import note, noted
from .state_pieces import Key


class WantedState(NamedTuple):
    """The elements [start, end) of this rank's shard of a state."""

    parameter: torch.Tensor
    name: str
    unit: Unit | None
    """How it is partitioned; None: it is whole on every rank."""
    start: int
    end: int


class StateReading(Protocol):
    """Such elements in flight."""

    def finish(self, into: torch.Tensor) -> None:
        """Fill a flat tensor of any type and device."""


Read = Callable[[Iterable[WantedState]], Iterator[StateReading]]
"""Reads what is wanted, in this order; may begin to read what comes later."""


@torch.no_grad()
def prepare_states(optimizer: Optimizer, large: Mapping[Key, torch.dtype]) -> None:
    """Make room for states of these parameters and names, where they are kept on a drive or in chunks, before anything changes.

    Raises `BudgetError` naming the smallest cap that works, and `UnsupportedOptimizerError` for a state that is not kept there.
    """
    finish_deferred(optimizer, report=False)
    hollow = hollow_of(optimizer)
    known = offloaded_states(optimizer, hollow)
    chunked = {p: kept for states in known for p, kept in states.kept.items()}
    for parameter, name in large:
        kept = chunked.get(parameter)  # type: ignore[call-overload]
        if kept is not None and name not in kept and name != MASTER:
            assert isinstance(parameter, ShardedParameter)
            raise UnsupportedOptimizerError(
                f"{name} of {parameter._zinf_unit.name} is among the states to be loaded; this {type(optimizer).__name__} keeps "
                f"{', '.join(kept) or 'none'}: make it with the settings with which it was saved. Nothing was changed"
            )
    loaded: dict[int, int] = collections.defaultdict(int)
    for (parameter, _), dtype in large.items():
        if isinstance(parameter, ShardedParameter):
            loaded[id(parameter)] += format_of(dtype).bytes(parameter._zinf_unit.shard_numel)
    in_memory = [p for p in hollow if p._zinf_unit.backing is None and p not in chunked]
    check_states_to_come(optimizer, in_memory, loaded=loaded)


@torch.no_grad()
def load_states(
    optimizer: Optimizer,
    small: Mapping[torch.Tensor, Mapping[str, Any]],
    large: Mapping[Key, torch.dtype],
    read: Read,
) -> None:
    """Replace all states: `small` ones are given, `large` ones are read piece by piece, to where this optimizer keeps them."""
    finish_deferred(optimizer, report=False)
    record = record_of(optimizer)
    record.mark_ended(f"loading the states of {type(optimizer).__name__} ended in its middle: load them again")
    hollow = hollow_of(optimizer)
    known = offloaded_states(optimizer, hollow)
    for states in known:
        states.forget_step()
    optimizer.state.clear()
    take_last_step(optimizer)
    for states in known:
        states.reconcile(optimizer)  # nothing is stored any more
    in_chunks = [(states, _wanted_in_chunks(states, large)) for states in known if states.transfers.store is not None]
    first = [wanted for _, chunks in in_chunks for each in chunks.values() for wanted in each]
    in_memory = _wanted_in_memory(optimizer, known, small, large, {id(wanted.parameter) for wanted in first})
    then = [wanted for states_of_one in in_memory.values() for each in states_of_one.values() for wanted in each]
    readings = read(itertools.chain(first, then))
    for states, chunks in in_chunks:
        _load_chunks(states, optimizer, small, chunks, readings)
    split = split_units(optimizer)
    for parameter, by_name in in_memory.items():
        unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else split.get(parameter)  # type: ignore[call-overload]
        record.loaded_master |= unit is None and (parameter, MASTER) in large
        types = large if unit is None else _types_without_master(optimizer, parameter, by_name, large)
        kept = {n: _load_in_memory(parameter, unit, each, types[parameter, n], readings) for n, each in by_name.items()}
        moved = {n: like_step(v, parameter, optimizer) for n, v in small[parameter].items()}
        optimizer.state[parameter] = noted({**moved, **kept}, unit) if unit is not None else {**moved, **kept}
    account_states(optimizer)
    if record.steps_done is not None:
        record.steps_done = 0  # as after `load_state_dict`: a step that failed was counted on some ranks only
    record.mark_whole()


def _wanted_in_chunks(states: OffloadedStates, large: Collection[Key]) -> dict[int, list[WantedState]]:
    """Return what goes to each chunk, by its number, in the order of the chunks."""
    return {
        number: [
            WantedState(p, name, p._zinf_unit, piece.start, piece.end)
            for p, piece in chunk.pieces
            for name in states.kept[p]
            if (p, name) in large
        ]
        for number, chunk in enumerate(states.transfers.chunks)
    }


def _wanted_in_memory(
    optimizer: Optimizer,
    known: Sequence[OffloadedStates],
    small: Collection[torch.Tensor],
    large: Collection[Key],
    on_drive: Collection[int],
) -> dict[torch.Tensor, dict[str, list[WantedState]]]:
    """Return the pieces of each state that is kept in memory, by parameter and name; `on_drive`: ids of other parameters."""
    split = split_units(optimizer)
    names: dict[int, list[str]] = {}
    for owner, name in large:
        names.setdefault(id(owner), []).append(name)
    found: dict[torch.Tensor, dict[str, list[WantedState]]] = {}
    for parameter in [p for group in optimizer.param_groups for p in group["params"] if p in small and id(p) not in on_drive]:
        unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else split.get(parameter)
        if isinstance(parameter, ShardedParameter):
            masters = any(parameter in states.kept and MASTER in states.kept[parameter] for states in known)
        else:  # partitioned later, perhaps with master copies; PyTorch's optimizers leave a state of another name alone
            masters = parameter.dtype in SHORT
        if not masters and MASTER in names.get(id(parameter), ()):  # the optimizer may have one of its own
            masters = MASTER in states_kept(optimizer, group_of(optimizer, parameter), parameter.dtype)
        pieces = [(0, parameter.numel())] if unit is None else pieces_of(unit)
        found[parameter] = {
            name: [WantedState(parameter, name, unit, start, end) for start, end in pieces]
            for name in names.get(id(parameter), [])
            if masters or name != MASTER
        }
    return found


def _load_chunks(
    states: OffloadedStates,
    optimizer: Optimizer,
    small: Mapping[torch.Tensor, Mapping[str, Any]],
    chunks: Mapping[int, Sequence[WantedState]],
    readings: Iterator[StateReading],
) -> None:
    """Fill the chunks of one `OffloadedStates` with a store."""
    transfers = states.transfers
    for number, wanted in chunks.items():
        if not wanted:
            continue
        buffer, views = transfers.read(number)
        pieces = {(id(parameter), piece.start): piece for parameter, piece in transfers.chunks[number].pieces}
        for each in wanted:
            next(readings).finish(part_of(views[each.name], pieces[id(each.parameter), each.start]))
        transfers.write(number, buffer)
    transfers.drain()
    stored: dict[int, set[str]] = {}
    for each in itertools.chain(*chunks.values()):
        stored.setdefault(id(each.parameter), set()).add(each.name)
    for parameter in states.kept:
        if parameter in small:
            entry = states.table.entry_of(parameter, optimizer)
            entry.memory = {n: like_step(v, parameter, optimizer) for n, v in small[parameter].items()}
            entry.stored = stored.get(id(parameter), set())
            note(entry.memory, parameter._zinf_unit)


def _types_without_master(
    optimizer: Optimizer, parameter: torch.Tensor, names: Iterable[str], large: Mapping[Key, torch.dtype]
) -> Mapping[Key, torch.dtype]:
    """Return the types of a parameter's states: those kept without a master copy, where one was saved and none is kept."""
    if (parameter, MASTER) not in large or MASTER in names:
        return large
    types = states_kept(optimizer, group_of(optimizer, parameter), parameter.dtype)
    return {(parameter, name): types.get(name, large[parameter, name]) for name in names}


def _load_in_memory(
    parameter: torch.Tensor,
    unit: Unit | None,
    wanted: Sequence[WantedState],
    dtype: torch.dtype,
    readings: Iterator[StateReading],
) -> torch.Tensor:
    if unit is None:
        whole = torch.empty(parameter.numel(), dtype=dtype)
        next(readings).finish(whole)
        return torch.empty_like(parameter, dtype=dtype).copy_(whole.view(parameter.shape))  # whose strides fused kernels expect
    on_host = unit.placement.optimizer == Tier.HOST and unit.context.link.topology.host_apart
    shard = torch.zeros(unit.shard_numel, dtype=dtype, device="cpu" if on_host else unit.device)
    for each in wanted:
        next(readings).finish(shard[each.start : each.end])
    return cast("torch.Tensor", kept_state(shard, unit))


def group_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the settings of a parameter's group."""
    return next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))


def like_step(value: Any, parameter: torch.Tensor, optimizer: Optimizer) -> Any:
    """Return a small state where PyTorch's optimizers keep it: on the device of the parameter where they are fused."""
    group = group_of(optimizer, parameter)
    on_device = isinstance(value, torch.Tensor) and (group.get("fused") or group.get("capturable"))
    return value.to(parameter.device) if on_device else value
