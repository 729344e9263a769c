"""Unmodified optimizers on shards: before `step` they are given this rank's part of every partitioned parameter.

The optimizer's own `step` runs on a stand-in: an object of the same class and attributes whose groups hold flat shards instead
of hollow parameters. The optimizer itself is never touched while `step` runs, so an exception inside leaves it usable; state
stays keyed by the parameter, so `state_dict()` works at any time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zinf_compile.errors import BudgetError, StepFailedError, UnsupportedOptimizerError
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.budget import check_states
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.save_check import warn_of_saving
from zinf_compile.sharded.unpartitioned import is_averaged
from zinf_compile.sharded.unpartitioned_report import bytes_of_states, report_whole
from zinf_compile.stats import log_first_step

from .chunk_step import ChunkStep
from .closure_step import Closure, closure_of, enter, has_entered, hollow_of, with_closure
from .deferred_step import LateStep, finish_late
from .elementwise_probe import check_elementwise, states_kept
from .fused_kernels import fused_settings
from .offloaded_states import StreamedStates, spoil, tear, torn
from .precision import warn_of_short_updates
from .shard_state import kept_state, like_parameter, local_gradient, shard_state
from .split_states import SplitStep, join_states, split_units
from .state_dict_hooks import drive_bytes, let_go_of_states, streamed_states
from .state_entry import in_memory, states_of
from .state_layout import check_layouts, noted, without_note
from .step_records import Due, note, settings_of_step

_STEP_LOCAL = ("param_groups", "state")
_state_bytes: weakref.WeakKeyDictionary[Optimizer, dict[Ledger, int]] = process_wide(weakref.WeakKeyDictionary())
_warned: weakref.WeakSet[Optimizer] = process_wide(weakref.WeakSet())
_described: weakref.WeakSet[Optimizer] = process_wide(weakref.WeakSet())
_checked: weakref.WeakKeyDictionary[Optimizer, set[int]] = process_wide(weakref.WeakKeyDictionary())
"""Parameters, by identity, whose states were counted against the caps."""
_installed: list[Any] = []


@dataclasses.dataclass(slots=True)
class _StandIn:
    owner: weakref.ref[Optimizer]
    optimizer: Optimizer
    groups: list[dict[str, Any]]
    """The owner's group behind each of the stand-in's."""
    shards: list[tuple[ShardedParameter, torch.Tensor]]
    """What is updated whole."""
    split: SplitStep
    streamed: _Streamed | None
    due: Due = dataclasses.field(default_factory=dict)
    """What the ranks compare once it is done."""


@dataclasses.dataclass(slots=True)
class _Streamed:
    """The part of a step that takes states from drives."""

    chunks: list[ChunkStep]
    """In the order of their updates; the stand-in updates the last one, after all others."""
    sources: Sequence[StreamedStates]
    settings: list[tuple[dict[str, Any], dict[str, Any]]]
    """Groups, and what the other chunks' steps changed in them; counts only once the whole step is over."""
    late: LateStep | None = None
    """What is left for the time of the next forward."""


_under_way: dict[int, _StandIn] = process_wide({})
_chunks_under_way: set[int] = process_wide(set())


def install() -> None:
    """Register the process-wide step hooks, once."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(torch.compiler.disable(_before_step)))
        _installed.append(register_optimizer_step_post_hook(torch.compiler.disable(_after_step)))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if id(optimizer) in _under_way or id(optimizer) in _chunks_under_way:  # a step that calls super().step(), or of one chunk
        return None
    if has_entered(optimizer):
        return None
    hollow = hollow_of(optimizer)
    if not hollow and not split_units(optimizer):
        return enter(optimizer, args, kwargs, partial(_fill_entered, optimizer))
    sources = _check(optimizer, hollow)
    kwargs = dict(kwargs)
    if sources:
        args, kwargs = _with_loss(args, kwargs)
        now = hollow_of(optimizer)
        if len(now) > len(hollow):  # the closure has partitioned more
            hollow, sources = now, _check(optimizer, now)
    record = _begin(optimizer, hollow, sources, by_closure=not sources and closure_of(args, kwargs) is not None)
    args, closure = (record.optimizer, *args[1:]), closure_of(args, kwargs)
    if closure is not None and record.streamed is None:  # otherwise it was called already
        args, kwargs = with_closure(args, kwargs, _refreshing(closure, record))
    return args, kwargs


def _check(optimizer: Optimizer, hollow: list[ShardedParameter]) -> list[StreamedStates]:
    """Check that the optimizer can step; return the chunks of what is updated in chunks."""
    if hollow:
        with hollow[0]._zinf_unit.context.meter.waiting():
            finish_late(optimizer)
        check_elementwise(optimizer, next(p._zinf_unit for p in hollow))
        _warn_of_local_gradients(optimizer, hollow[0])
    join_states(optimizer, hollow)
    split = split_units(optimizer)
    check_layouts(optimizer, [(p, optimizer.state[p]) for p in (*hollow, *split) if p in optimizer.state])
    warn_of_short_updates(optimizer, hollow)
    with _stating(optimizer):
        return streamed_states(optimizer, hollow)


def _begin(
    optimizer: Optimizer, hollow: Sequence[ShardedParameter], sources: Sequence[StreamedStates], *, by_closure: bool = False
) -> _StandIn:
    """Update all but what the caller's own step is to update; return what that runs on. `by_closure`: it makes the gradients."""
    due = settings_of_step(optimizer, by_closure=by_closure)
    in_memory = [p for p in hollow if p._zinf_unit.home is None and not any(p in states for states in sources)]
    _check_budget(optimizer, in_memory)
    with _stating(optimizer):
        streamed = _step_chunks(optimizer, sources)
        record = _stand_in_for(optimizer, in_memory, streamed)
        record.due = due
    for stale in [key for key, other in _under_way.items() if other.owner() in (None, optimizer)]:
        del _under_way[stale]  # of a step that raised
    _under_way[id(record.optimizer)] = record
    return record


def _fill_entered(optimizer: Optimizer, stand_in: Optimizer, closure: Closure, loss: Any) -> Closure:
    """Let a step that was entered before there were partitioned parameters go on with their shards; return its next closure."""
    hollow = hollow_of(optimizer)
    sources = _check(optimizer, hollow)
    record = _begin(optimizer, hollow, sources)
    _become(stand_in, record)
    return _refreshing(closure, record) if record.streamed is None else lambda: loss


def _become(stand_in: Optimizer, record: _StandIn) -> None:
    """Let an object that a step runs on already be what the record says it should run on."""
    _under_way.pop(id(record.optimizer), None)
    stand_in.__dict__ = vars(record.optimizer)
    record.optimizer = stand_in
    _under_way[id(stand_in)] = record


def _stand_in_for(optimizer: Optimizer, in_memory: Sequence[ShardedParameter], streamed: _Streamed | None) -> _StandIn:
    """Make what the caller's own step runs on."""
    shards = {p: like_parameter(p._zinf_unit.shard, p._zinf_unit) for p in in_memory}
    members = {id(p): p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, ShardedParameter)}
    members.update((id(p), shard) for p, shard in shards.items())
    split = SplitStep(optimizer)
    members.update(split.members())
    if streamed is not None:
        members.update((id(p), part) for p, part in streamed.chunks[-1].parts)
    due = {id(p) for source in (streamed.sources if streamed is not None else ()) for p in source.due}

    def rests(group: dict[str, Any]) -> bool:
        """Say whether no chunk is of the group: as in eager, its counters go on without a gradient."""
        return not any(id(p) in due for p in group["params"])

    stand_in, groups = _make_stand_in(optimizer, members, without_members=rests)
    record = _StandIn(weakref.ref(optimizer), stand_in, groups, list(shards.items()), split, streamed)
    _fill(optimizer, record)
    return record


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not args or args[0] is optimizer:  # nothing partitioned, or a step called by the stand-in's own: super().step()
        return
    record = _under_way.pop(id(args[0]), None)
    if record is None:
        return
    stand_in = record.optimizer
    for parameter, shard in record.shards:
        state = stand_in.state.pop(shard, None)
        if state is not None:
            unit = parameter._zinf_unit
            _keep(optimizer, parameter, noted({k: kept_state(v, unit) for k, v in state.items()}, unit))
        shard.grad = None
        torch.autograd.graph.increment_version(parameter)
    record.split.finish(optimizer, stand_in)
    if record.streamed is not None:
        with _stating(optimizer):
            _finish_chunks(optimizer, record.streamed, stand_in)
    for key, value in stand_in.state.items():
        optimizer.state[key] = value
    for mine, theirs in zip(record.groups, stand_in.param_groups, strict=True):
        mine.update(_settings(theirs))
    for name, value in vars(stand_in).items():
        if name not in _STEP_LOCAL:
            vars(optimizer)[name] = value
    note(optimizer, record.due)
    _account(optimizer)
    _end_step(optimizer)


def _keep(optimizer: Optimizer, parameter: ShardedParameter, state: dict[str, Any]) -> None:
    """Set what `optimizer.state` has of a parameter; as in eager, in the mapping that callers may hold."""
    known = states_of(optimizer, parameter)
    if type(known) is dict:
        known.clear()
        known.update(state)
    else:
        optimizer.state[parameter] = state


def _end_step(optimizer: Optimizer) -> None:
    hollow = hollow_of(optimizer)
    first = optimizer not in _described
    _described.add(optimizer)
    split = {unit.context: None for unit in split_units(optimizer).values()}
    for context in {p._zinf_unit.context: None for p in hollow} | split:
        context.end_step()
        if first and hollow:
            held = _state_bytes.get(optimizer, {})
            in_memory = sum(held.get(ledger, 0) for ledger in {context.ledger, context.host_ledger})
            units = split_units(optimizer).items()
            split_bytes = sum(bytes_of_states(optimizer, p) for p, unit in units if unit.context is context)
            log_first_step(context, optimizer, hollow, in_memory - split_bytes + drive_bytes(optimizer))
            report_whole(context, optimizer, hollow)
            warn_of_saving(context)


@contextlib.contextmanager
def _stating(optimizer: Optimizer) -> Iterator[None]:
    """Let an error of a step say what of it is done; a step that is refused is none."""
    try:
        yield
    except StepFailedError:
        raise
    except Exception as error:
        if optimizer not in torn and isinstance(error, BudgetError | UnsupportedOptimizerError):
            raise
        if optimizer in torn:
            spoil(optimizer)
        done = torn.get(optimizer, "nothing is updated yet, parameters and states are as before this step")
        raise StepFailedError(f"{done}. Cause: {error}") from error


def _check_budget(optimizer: Optimizer, parameters: Sequence[ShardedParameter]) -> None:
    """Raise `BudgetError`, before the first step makes them, where states in memory exceed a cap."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    missing: dict[Context, int] = collections.defaultdict(int)
    checked = _checked.setdefault(optimizer, set())
    for p in parameters:
        if id(p) not in checked:
            checked.add(id(p))
            unit = p._zinf_unit
            if p.requires_grad and p not in optimizer.state:
                kept = states_kept(optimizer, groups[id(p)], unit.dtype)
                missing[unit.context] += sum(unit.shard_numel * dtype.itemsize for dtype in kept.values())
    for context, states in missing.items():
        check_states(context, on_device=True, states=states, slots=0, name=type(optimizer).__name__)


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure now, before any chunk is updated; the optimizer is given one that returns the loss."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return with_closure(args, kwargs, lambda: loss)


def _step_chunks(optimizer: Optimizer, sources: Sequence[StreamedStates]) -> _Streamed | None:
    """Update all chunks but the last, which the caller's own step does; None where there is none."""
    if not sources:
        return None
    if optimizer in torn:
        raise StepFailedError(torn[optimizer])
    streamed = _Streamed([], sources, [])
    chunks = streamed.chunks
    with torch.no_grad():
        for source in sources:
            source.begin(optimizer)
        now = [source for source in sources if not source.follows]
        due = sum(source.chunks_due for source in now)
        for chunk in itertools.chain.from_iterable(source.chunk_steps(optimizer) for source in now):
            chunks.append(chunk)
            if len(chunks) < due:
                tear(optimizer, len(chunks))
                streamed.settings += _step_one(optimizer, chunk)
        if len(now) < len(sources):
            streamed.late = LateStep(optimizer, [source for source in sources if source.follows], _step_one)
            if not chunks:
                chunks.append(streamed.late.take_first())
    if not chunks:
        return None
    tear(optimizer, len(chunks))
    return streamed


def _step_one(optimizer: Optimizer, chunk: ChunkStep) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Update one chunk; return groups, and what that changed in them."""
    parts = {id(p): part for p, part in chunk.parts}
    stand_in, groups = _make_stand_in(optimizer, parts, without_members=lambda group: False)
    stand_in.state.update(chunk.state)
    vars(stand_in)["_optimizer_step_pre_hooks"] = collections.OrderedDict()  # the user's hooks are of the whole step
    vars(stand_in)["_optimizer_step_post_hooks"] = collections.OrderedDict()
    _chunks_under_way.add(id(stand_in))
    try:
        type(stand_in).step(stand_in)
    finally:
        _chunks_under_way.discard(id(stand_in))
    chunk.finish(stand_in.state)
    return [(mine, _settings(theirs)) for mine, theirs in zip(groups, stand_in.param_groups, strict=True)]


def _finish_chunks(optimizer: Optimizer, streamed: _Streamed, stand_in: Optimizer) -> None:
    """The step is over: finish its last chunk, and make count what all chunks left behind."""
    last = streamed.chunks[-1]
    last.finish(stand_in.state)
    for mine, changed in streamed.settings:
        mine.update(changed)
    late = streamed.late
    for chunk in streamed.chunks:
        if late is None or chunk not in late.done:
            chunk.settle(optimizer)
    for parameter in {p for source in streamed.sources for p in source.due}:
        torch.autograd.graph.increment_version(parameter)
    for source in streamed.sources:
        if not source.follows:
            source.finish(optimizer)
    if late is not None:
        late.start()
    else:
        del torn[optimizer]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "fused")}


def _make_stand_in(
    optimizer: Optimizer, members: dict[int, torch.Tensor], *, without_members: Callable[[dict[str, Any]], bool]
) -> tuple[Optimizer, list[dict[str, Any]]]:
    """Make an optimizer of `members`, given by the identity of the parameters that they stand for.

    Returns it with the group behind each of its own. A group of none of them is left away unless `without_members` of it.
    """
    stand_in: Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update({k: v for k, v in vars(optimizer).items() if k not in _STEP_LOCAL})
    stand_in.param_groups, groups = [], []
    for group in optimizer.param_groups:
        present = [members[id(p)] for p in group["params"] if id(p) in members]
        if present or without_members(group):
            stand_in.param_groups.append({**group, **fused_settings(optimizer, group, present), "params": present})
            groups.append(group)
    stand_in.state = collections.defaultdict(dict)
    return stand_in, groups


def _fill(optimizer: Optimizer, record: _StandIn) -> None:
    partitioned = {id(p) for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)}
    partitioned |= record.split.members().keys()
    for key, state in optimizer.state.items():
        if id(key) not in partitioned:
            record.optimizer.state[key] = state
    for parameter, shard in record.shards:
        shard.grad = local_gradient(parameter)
        if parameter in optimizer.state:
            unit = parameter._zinf_unit
            given = without_note(optimizer.state[parameter])
            record.optimizer.state[shard] = {k: shard_state(v, unit, k, optimizer) for k, v in given.items()}
    record.split.fill(optimizer, record.optimizer)
    if record.streamed is not None:
        record.optimizer.state.update(record.streamed.chunks[-1].state)


def _refreshing(closure: Closure, record: _StandIn) -> Closure:
    """Return a closure after which the shards have the gradients; the first call of it may partition more parameters."""
    known = len(hollow_of(record.owner() or record.optimizer))
    first = True

    def call() -> Any:
        nonlocal first, record
        loss = closure()
        optimizer = record.owner()
        if first and optimizer is not None and len(hollow_of(optimizer)) > known:
            now = hollow_of(optimizer)
            fresh = _begin(optimizer, now, _check(optimizer, now))
            _become(record.optimizer, fresh)
            record = fresh
        first = False
        for parameter, shard in record.shards:
            shard.grad = local_gradient(parameter)
        record.split.refresh()
        return loss

    return call


def _account(optimizer: Optimizer) -> None:
    """Tell the ledgers what this optimizer's state takes on this rank; what streams through is counted where it does."""
    held: dict[Ledger, int] = collections.defaultdict(int)
    for parameter in [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]:
        context = parameter._zinf_unit.context
        for name, value in in_memory(states_of(optimizer, parameter)).items():
            if isinstance(value, torch.Tensor) and name != "step":
                on_host = parameter._zinf_unit.placement.optimizer == "host"
                held[context.host_ledger if on_host else context.ledger] += value.numel() * value.element_size()
    for whole, unit in split_units(optimizer).items():
        held[unit.context.ledger] += bytes_of_states(optimizer, whole)
    if optimizer not in _state_bytes:
        _state_bytes[optimizer] = {}
        weakref.finalize(optimizer, _forget, _state_bytes[optimizer]).atexit = False
    known = _state_bytes[optimizer]
    for ledger, count in held.items():
        ledger.add("states", count - known.get(ledger, 0))
        known[ledger] = count


def drop_states() -> None:
    """Take the states of partitioned parameters out of every optimizer, wherever they are; other parameters' stay."""
    let_go_of_states()
    for optimizer, known in list(_state_bytes.items()):
        for parameter in [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]:
            optimizer.state.pop(parameter, None)
        _forget(known)
        known.clear()


def _forget(known: dict[Ledger, int]) -> None:
    for ledger, count in known.items():
        ledger.add("states", -count)


def _warn_of_local_gradients(optimizer: Optimizer, example: ShardedParameter) -> None:
    size = example._zinf_unit.context.size
    if size == 1 or optimizer in _warned:
        return
    whole = [p for p in itertools.chain(*(g["params"] for g in optimizer.param_groups)) if not isinstance(p, ShardedParameter)]
    local = [p for p in whole if p.grad is not None and not is_averaged(p)]
    if local:
        _warned.add(optimizer)
        warnings.warn(
            f"{len(local)} parameters of this {type(optimizer).__name__} were never used by a compiled graph (first shape: "
            f"{list(local[0].shape)}): they are not partitioned and their gradients are not averaged over the {size} ranks. "
            "Compile the whole model, or average these gradients yourself",
            stacklevel=3,
        )
