"""Memory of an optimizer's states: checked against the caps before the first step, then added to the ledgers."""

from __future__ import annotations

import collections
import itertools
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.sharded.budget_checks import check_states
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.save_check import warn_of_saving
from zinf_compile.sharded.unpartitioned import is_averaged
from zinf_compile.sharded.unpartitioned_report import bytes_of_states, report_whole
from zinf_compile.stats import log_first_step

from .closure_step import hollow_of
from .elementwise_probe import states_kept
from .record import OptimizerRecord, all_records, record_of, take_last_step
from .split_states import split_units
from .state_dict_hooks import drive_bytes
from .state_entry import in_memory, states_of

_WARNED = "gradients that are not averaged"


def check_states_to_come(
    optimizer: Optimizer, parameters: Sequence[ShardedParameter], *, loaded: Mapping[int, int] | None = None
) -> None:
    """Raise `BudgetError` if the states in memory that the first step will create exceed a cap.

    `loaded`: bytes of a parameter's states, by its id, that are about to take the place of those that it has.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    missing: dict[Context, int] = collections.defaultdict(int)
    counted = record_of(optimizer).counted
    fresh = [p for p in parameters if id(p) not in counted]
    for p in parameters if loaded else ():
        known = in_memory(states_of(optimizer, p)).values()
        held = sum(value.nbytes for value in known if isinstance(value, torch.Tensor) and value.dim())
        missing[p._zinf_unit.context] += max(0, loaded.get(id(p), 0) - held) if loaded else 0
    for p in fresh:
        if p.requires_grad and p not in optimizer.state and not (loaded and id(p) in loaded):
            unit = p._zinf_unit
            kept = states_kept(optimizer, groups[id(p)], unit.dtype)
            missing[unit.context] += sum(format_of(dtype).bytes(unit.shard_numel) for dtype in kept.values())
    for context, states in missing.items():
        check_states(context, on_device=True, states=states, slots=0, name=type(optimizer).__name__)
    counted.update(id(p) for p in fresh)


def account_states(optimizer: Optimizer) -> None:
    """Add this optimizer's states on this rank to the ledgers; chunk buffers are counted by `ChunkTransfers`."""
    held: dict[Ledger, int] = collections.defaultdict(int)
    for parameter in hollow_of(optimizer):
        context = parameter._zinf_unit.context
        for name, value in in_memory(states_of(optimizer, parameter)).items():
            if isinstance(value, torch.Tensor) and name != "step":
                on_host = parameter._zinf_unit.placement.optimizer == Tier.HOST
                held[context.memory.host_ledger if on_host else context.memory.ledger] += format_of(value.dtype).bytes(
                    value.numel()
                )
    for whole, unit in split_units(optimizer).items():
        held[unit.context.memory.ledger] += bytes_of_states(optimizer, whole)
    record = record_of(optimizer)
    if record.state_bytes is None:
        record.state_bytes = {}
        weakref.finalize(optimizer, _forget, record.state_bytes).atexit = False
    known = record.state_bytes
    for ledger, count in held.items():
        ledger.add("states", count - known.get(ledger, 0))
        known[ledger] = count


def drop_states() -> None:
    """Remove the states of partitioned parameters from every optimizer, on all tiers; it has none to save or load any more."""
    for optimizer, record in all_records():
        _release(record)
        take_last_step(optimizer)
        if partitioned := hollow_of(optimizer):
            optimizer.register_state_dict_pre_hook(_refuse_closed)
            optimizer.register_load_state_dict_pre_hook(_refuse_closed)
        for parameter in partitioned:
            optimizer.state.pop(parameter, None)


def _refuse_closed(optimizer: Optimizer, *given: object) -> None:
    for parameter in hollow_of(optimizer):
        _ = parameter._zinf_unit.context.ranks  # a context that was closed raises


def forget_states(optimizer: Optimizer) -> None:
    """Release what was prepared or loaded for parameters that are not partitioned after all."""
    record = record_of(optimizer)
    _release(record)
    take_last_step(optimizer)
    if record.offloaded is not None:
        record.offloaded.clear()  # its hooks stay
    record.counted.clear()
    if record.incomplete:
        optimizer.state.clear()


def _release(record: OptimizerRecord) -> None:
    for states in record.offloaded or []:
        states.transfers.release()
    known = record.state_bytes or {}
    _forget(known)
    known.clear()
    record.filled_bytes = None
    record.flat.clear()


def _forget(known: dict[Ledger, int]) -> None:
    for ledger, count in known.items():
        ledger.add("states", -count)


def report_step(optimizer: Optimizer, contexts: Iterable[Context] | None = None) -> None:
    """End a step for meters and ledgers; after the first one, log its memory and traffic. `contexts`: of all its parameters."""
    if contexts is not None and record_of(optimizer).reported:
        for context in contexts:
            context.end_step()
        return
    hollow, record = hollow_of(optimizer), record_of(optimizer)
    first, record.reported = not record.reported, True
    split = {unit.context: None for unit in split_units(optimizer).values()}
    for context in {p._zinf_unit.context: None for p in hollow} | split:
        context.end_step()
        if first and hollow:
            held = record.state_bytes or {}
            in_memory = sum(held.get(ledger, 0) for ledger in {context.memory.ledger, context.memory.host_ledger})
            units = split_units(optimizer).items()
            split_bytes = sum(bytes_of_states(optimizer, p) for p, unit in units if unit.context is context)
            log_first_step(context, optimizer, hollow, in_memory - split_bytes + drive_bytes(optimizer))
            report_whole(context, optimizer, hollow)
            warn_of_saving(context)


def warn_of_local_gradients(optimizer: Optimizer, example: ShardedParameter) -> None:
    """Warn, once, of unpartitioned parameters whose gradients are not averaged over the ranks."""
    size = example._zinf_unit.shard_group.size
    if size == 1 or _WARNED in record_of(optimizer).warned:
        return
    whole = [p for p in itertools.chain(*(g["params"] for g in optimizer.param_groups)) if not isinstance(p, ShardedParameter)]
    local = [p for p in whole if p.grad is not None and not is_averaged(p)]
    if local:
        record_of(optimizer).warned.add(_WARNED)
        warnings.warn(
            f"{len(local)} parameters of this {type(optimizer).__name__} were never used by a compiled graph (first shape: "
            f"{list(local[0].shape)}): they are not partitioned and their gradients are not averaged over the {size} ranks. "
            "Compile the whole model, or average these gradients yourself",
            stacklevel=3,
        )
