"""Sets up chunked steps for an optimizer, with hooks that read states from drives for `state_dict` and write loaded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import StepFailedError
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import MASTER, Kept
from .deferred_step import finish_deferred
from .elementwise_probe import check_pieces, states_kept
from .lay_out_anew import lay_out_anew, outgrown
from .offloaded_states import OffloadedStates
from .precision import keep_precision, warn_of_rounding
from .record import State, record_of
from .state_entry import in_memory
from .state_exchange import drop_all, read_all
from .state_layout import check_layouts


def offloaded_states(optimizer: Optimizer, hollow: Sequence[ShardedParameter]) -> list[OffloadedStates]:
    """Return the `OffloadedStates` of the parameters updated in chunks, made for those that are new."""
    record = record_of(optimizer)
    known: list[OffloadedStates] = [] if record.offloaded is None else record.offloaded
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for number, states in enumerate(known):
        if (more := outgrown(optimizer, states, groups)) is not None:
            known[number] = lay_out_anew(optimizer, states, more, finish_deferred)
    fresh: dict[tuple[int, Any], list[tuple[ShardedParameter, Kept]]] = {}
    kinds: dict[tuple[int, int, torch.dtype], _Streaming] = {}
    for p in hollow:
        if known and any(p in states for states in known):
            continue
        unit = p._zinf_unit
        key = (id(unit.context), id(unit.placement), unit.dtype)
        kind = kinds.get(key) or kinds.setdefault(key, _Streaming(unit))
        if not kind.streams or (not p.requires_grad and p.grad is None):
            continue
        check_pieces(optimizer, groups[id(p)], unit)
        kept = states_kept(optimizer, groups[id(p)], kind.master or unit.dtype)
        if kind.master:
            kept = {**kept, MASTER: kind.master}
        if kept or kind.converts or kind.streams_values:
            fresh.setdefault((id(unit.context), unit.placement.without_tiles), []).append((p, kept))
    if fresh and record.offloaded is None:
        record.offloaded = known
        optimizer.register_state_dict_pre_hook(_before_state_dict)
        optimizer.register_state_dict_post_hook(_after_state_dict)
        keep_precision(optimizer)
        optimizer.register_load_state_dict_pre_hook(_before_load)
        optimizer.register_load_state_dict_post_hook(_after_load)
    for rows in fresh.values():
        known.append(OffloadedStates(optimizer, [p for p, _ in rows], [kept for _, kept in rows], finish_deferred))
        for p, kept in rows:
            if p in optimizer.state and kept.keys() & in_memory(optimizer.state[p]).keys():
                warn_of_rounding(optimizer, p, kept)
                known[-1].reconcile(optimizer)
                break
    return known


class _Streaming:
    """The kinds of states that a step moves for parameters of one placement and type."""

    def __init__(self, unit: Unit) -> None:
        placement, topology = unit.placement, unit.context.link.topology
        self.master = placement.master_of(unit.dtype)
        self.converts = unit.reduce_dtype != (self.master or unit.dtype)
        """Whether gradients are converted, one chunk at a time."""
        self.streams_values = placement.streams_values(topology)
        self.streams = bool(self.master) or self.converts or placement.streams(topology)


def drive_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's states that live on drives."""
    return sum(states.drive_bytes for states in record_of(optimizer).offloaded or [])


@torch.no_grad()
def _before_state_dict(optimizer: Optimizer) -> None:
    finish_deferred(optimizer)
    record = record_of(optimizer)
    if record.state is State.INCOMPLETE:
        raise StepFailedError(record.incomplete)
    known: list[OffloadedStates] = record.offloaded or []
    try:
        for states in known:
            read_all(states.table, optimizer)
    except BaseException:
        _after_state_dict(optimizer, {})
        raise


def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for states in record_of(optimizer).offloaded or []:
        drop_all(states.table, optimizer)


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    given = state_dict.get("state", {})
    parameters = enumerate(p for group in optimizer.param_groups for p in group["params"])
    check_layouts(optimizer, [(p, given[i]) for i, p in parameters if isinstance(p, ShardedParameter) and i in given])
    finish_deferred(optimizer, report=False)


@torch.no_grad()
def _after_load(optimizer: Optimizer) -> None:
    record_of(optimizer).mark_whole()
    for states in record_of(optimizer).offloaded or []:
        states.forget_step()
    move_loaded(optimizer)


@torch.no_grad()
def move_loaded(optimizer: Optimizer) -> None:
    """Move states that were just loaded to their tier."""
    for states in record_of(optimizer).offloaded or []:
        states.reconcile(optimizer)
