"""Which optimizers are stepped chunk by chunk, and their hooks: states are whole while `state_dict` is taken."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import MASTER, Kept
from .deferred_step import finish_late
from .elementwise_probe import check_pieces, states_kept
from .offloaded_states import StreamedStates, torn
from .precision import keep_precision, warn_of_rounding
from .state_entry import in_memory
from .state_exchange import bring, drop
from .state_layout import check_layouts

_streamed: weakref.WeakKeyDictionary[Optimizer, list[StreamedStates]] = process_wide(weakref.WeakKeyDictionary())


def let_go_of_states() -> None:
    """Give back the memory and files of all states that are off the device; nobody may use them any more."""
    for known in list(_streamed.values()):
        for states in known:
            states.let_go()


def streamed_states(optimizer: Optimizer, hollow: Sequence[ShardedParameter]) -> list[StreamedStates]:
    """Return the chunks of these parameters, for those that are updated in chunks; lays out what is new."""
    known = _streamed.get(optimizer, [])
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    fresh: dict[tuple[int, Any], list[tuple[ShardedParameter, Kept]]] = {}
    for p in hollow:
        unit = p._zinf_unit
        unified, master = unit.context.bridge.unified, unit.placement.master_of(unit.dtype)
        converts = unit.reduce_dtype != (
            master or unit.dtype
        )  # a gradient in the type of the update is there for a chunk at a time
        streams = master or converts or unit.placement.streams(unified=unified)
        if (not p.requires_grad and p.grad is None) or not streams:
            continue
        if any(p in states for states in known):
            continue
        check_pieces(optimizer, groups[id(p)], unit)
        kept = states_kept(optimizer, groups[id(p)], master or unit.dtype)
        if master:
            kept = {**kept, MASTER: master}
        if kept or converts or unit.placement.streams_values(unified=unified):
            fresh.setdefault((id(unit.context), unit.placement), []).append((p, kept))
    if fresh and optimizer not in _streamed:
        _streamed[optimizer] = known
        optimizer.register_state_dict_pre_hook(_before_state_dict)
        optimizer.register_state_dict_post_hook(_after_state_dict)
        keep_precision(optimizer)
        optimizer.register_load_state_dict_pre_hook(_before_load)
        optimizer.register_load_state_dict_post_hook(_after_load)
    for rows in fresh.values():
        known.append(StreamedStates(optimizer, [p for p, _ in rows], [kept for _, kept in rows], finish_late))
        for p, kept in rows:
            if p in optimizer.state and kept.keys() & in_memory(optimizer.state[p]).keys():
                warn_of_rounding(optimizer, p, kept)
                known[-1].absorb(optimizer)
                break
    return known


def drive_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's states that live on drives."""
    return sum(states.drive_bytes for states in _streamed.get(optimizer, []))


@torch.no_grad()
def _before_state_dict(optimizer: Optimizer) -> None:
    finish_late(optimizer)
    known = _streamed.get(optimizer, [])
    try:
        for states in known:
            bring(states, optimizer)
    except BaseException:
        _after_state_dict(optimizer, {})
        raise


def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for states in _streamed.get(optimizer, []):
        drop(states, optimizer)


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    given = state_dict.get("state", {})
    parameters = enumerate(p for group in optimizer.param_groups for p in group["params"])
    check_layouts(optimizer, [(p, given[i]) for i, p in parameters if isinstance(p, ShardedParameter) and i in given])
    finish_late(optimizer, tell=False)


@torch.no_grad()
def _after_load(optimizer: Optimizer) -> None:
    torn.pop(optimizer, None)
    for states in _streamed.get(optimizer, []):
        states.forget_step()
    absorb_loaded(optimizer)


@torch.no_grad()
def absorb_loaded(optimizer: Optimizer) -> None:
    """Move states that were just loaded to where they live."""
    for states in _streamed.get(optimizer, []):
        states.absorb(optimizer)
