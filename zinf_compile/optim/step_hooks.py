"""Step hooks that let unmodified optimizers update this rank's shards of partitioned parameters.

The optimizer's own `step` runs on a stand-in: an object of the same class and attributes whose groups hold flat shards instead
of hollow parameters. The optimizer itself is never touched while `step` runs, so an exception inside leaves it usable; state
stays keyed by the parameter, so `state_dict()` works at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zinf_compile.errors import StepFailedError, UnsupportedOptimizerError
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.shared_memory import all_left, forget_unused, former_owner
from zinf_compile.sharded.wrapping_optimizers import is_wrapper

from .before_updates import prepare_updates
from .chunked_step import begin_chunks, explaining_progress
from .closure_step import Closure, closure_of, hollow_of, run_on_stand_in, with_closure
from .deferred_step import finish_deferred
from .eager_models import check_compiled
from .elementwise_probe import check_elementwise
from .offloaded_states import OffloadedStates
from .precision import drop_masters, warn_of_short_updates
from .record import State, record_of, set_last_step
from .repeated_step import begin_repeated, keep_last_step
from .running_step import RunningStep, end_step, make_running_step
from .shard_state import local_gradient
from .split_states import join_states, split_units
from .state_accounts import account_states, check_states_to_come, report_step, warn_of_local_gradients
from .state_dict_hooks import offloaded_states
from .state_layout import check_layouts
from .step_gradient import mark_applied
from .step_records import note, settings_of_step

_installed: list[Any] = []


def install() -> None:
    """Register the process-wide step hook, once."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(torch.compiler.disable(_run_hooks)))


class _Before:
    """A user's hook before a step, which `_run_hooks` calls, behind which the step on shards begins; PyTorch calls it, too.

    PyTorch runs process-wide hooks first, and would run the user's when the step had begun.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    @torch.compiler.disable
    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.hook(optimizer, args, kwargs) if _steps_by_itself(optimizer) else None


def _steps_by_itself(optimizer: Optimizer) -> bool:
    """Say whether it steps as it is: what stands for another one in its step, and one that steps others."""
    return record_of(optimizer).state is State.STAND_IN or is_wrapper(optimizer)


def _run_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the user's hooks before a step, and begin it; let it end before the user's hooks after it."""
    if _steps_by_itself(optimizer):
        return None
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    if _AFTER_STEP not in after.values():
        optimizer.register_step_post_hook(_AFTER_STEP)
    after.move_to_end(next(number for number, hook in after.items() if hook is _AFTER_STEP), last=False)
    given = None
    for number in list(before):
        if number in before:  # an earlier one may have removed it
            hook = before[number]
            before[number] = hook = hook if isinstance(hook, _Before) else _Before(hook)
            result = hook.hook(optimizer, args, kwargs)
            if result is not None:
                if not isinstance(result, tuple) or len(result) != 2:
                    return result  # PyTorch refuses it
                args, kwargs = given = result
    begun = _before_step(optimizer, args, kwargs)
    return given if begun is None else begun


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    record = record_of(optimizer)
    if record.saving is not None:
        record.saving.tell()  # with the other ranks, whatever else there is to say
    if record.state is State.INCOMPLETE and record.deferred is None:  # a deferred step says itself why it failed
        raise StepFailedError(record.incomplete)
    if closure_of(args, kwargs) is None and (repeated := begin_repeated(optimizer)) is not None:
        repeated.begin_timing()
        return (repeated.optimizer, *args[1:]), kwargs
    hollow = hollow_of(optimizer)
    if (left := all_left()) != record.memory_left:
        _check_memory(optimizer)
        record.memory_left = left
    if not hollow and not split_units(optimizer):
        check_compiled(optimizer, masters=record.loaded_master)
        if record.loaded_master:
            record.loaded_master = False
            drop_masters(optimizer, whole=True)
        return run_on_stand_in(optimizer, args, kwargs, partial(_fill_entered, optimizer))
    sources = _check(optimizer, hollow)
    kwargs = dict(kwargs)
    if sources:
        args, kwargs = _with_loss(args, kwargs)
        now = hollow_of(optimizer)
        if len(now) > len(hollow):  # the closure partitioned more parameters
            hollow, sources = now, _check(optimizer, now)
    running = _begin(optimizer, hollow, sources, by_closure=not sources and closure_of(args, kwargs) is not None)
    args, closure = (running.optimizer, *args[1:]), closure_of(args, kwargs)
    if closure is not None and running.chunked is None:  # chunked steps have called it already
        args, kwargs = with_closure(args, kwargs, _refreshing(closure, running))
    running.begin_timing()
    return args, kwargs


def _check_memory(optimizer: Optimizer) -> None:
    """Raise `UnsupportedOptimizerError` for a tensor with the memory that a partitioned parameter once had."""
    if not forget_unused():
        return
    for tensor in (p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, ShardedParameter)):
        if name := former_owner(tensor)[0]:
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} updates a tensor of shape {list(tensor.shape)} in the memory that parameter {name} "
                "had before it was partitioned, and no longer has (one flat buffer for all parameters, say). Give the optimizer "
                "the model's own parameters"
            )


def _check(optimizer: Optimizer, hollow: list[ShardedParameter]) -> list[OffloadedStates]:
    """Check that the optimizer can step; return the `OffloadedStates` of parameters updated in chunks."""
    if hollow:
        with hollow[0]._zinf_unit.context.lanes.meter.waiting():
            finish_deferred(optimizer)
        check_elementwise(optimizer, next(p._zinf_unit for p in hollow))
        warn_of_local_gradients(optimizer, hollow[0])
    join_states(optimizer, hollow)
    drop_masters(optimizer, whole=record_of(optimizer).loaded_master)
    record_of(optimizer).loaded_master = False
    split = split_units(optimizer)
    check_layouts(optimizer, [(p, optimizer.state[p]) for p in (*hollow, *split) if p in optimizer.state], renew=True)
    warn_of_short_updates(optimizer, hollow)
    with explaining_progress(optimizer):
        return offloaded_states(optimizer, hollow)


def _begin(
    optimizer: Optimizer, hollow: Sequence[ShardedParameter], sources: Sequence[OffloadedStates], *, by_closure: bool = False
) -> RunningStep:
    """Update all chunks but the last; return the step that the caller runs. `by_closure`: a closure computes the gradients."""
    prepare_updates(optimizer)
    _drop_copies(hollow)
    due = settings_of_step(optimizer, by_closure=by_closure)
    in_memory = [p for p in hollow if p._zinf_unit.backing is None and not any(p in states for states in sources)]
    check_states_to_come(optimizer, in_memory)
    with explaining_progress(optimizer):
        chunked = begin_chunks(optimizer, sources)
        running = make_running_step(optimizer, in_memory, chunked)
        running.due = due
    record_of(optimizer).step = running  # replaces one that raised
    return running


def _drop_copies(parameters: Iterable[ShardedParameter]) -> None:
    """Have no full copies that stay on the device of parameters that a step changes."""
    for parameter in parameters:
        parameter._zinf_unit.context.full_copies.drop(parameter._zinf_unit)


def _fill_entered(optimizer: Optimizer, stand_in: Optimizer, closure: Closure, loss: Any) -> Closure:
    """Continue, on shards, a step that began before its parameters were partitioned; return its next closure."""
    hollow = hollow_of(optimizer)
    sources = _check(optimizer, hollow)
    running = _begin(optimizer, hollow, sources)
    _become(stand_in, running)
    return _refreshing(closure, running) if running.chunked is None else lambda: loss


def _become(stand_in: Optimizer, running: RunningStep) -> None:
    """Give the object that a step already runs on the attributes of the stand-in of `running`."""
    stand_in.__dict__ = vars(running.optimizer)
    running.optimizer = stand_in


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if closure_of(args, kwargs) is not None:
        check_compiled(optimizer)  # its gradients are there now
    if not args or args[0] is optimizer:  # nothing partitioned, or a stand-in's super().step()
        return
    record = record_of(optimizer)
    running: RunningStep | None = record.step
    if running is None or running.optimizer is not args[0]:
        return
    record.step = None
    running.timing.close()
    last, running.last = running.last, None
    if last is not None and last.end(optimizer):
        note(optimizer, running.due)
        mark_applied(optimizer)
        report_step(optimizer, last.contexts)
        set_last_step(optimizer, last)
        return
    end_step(optimizer, running)
    note(optimizer, running.due)
    mark_applied(optimizer)
    if closure_of(args, kwargs) is None:
        keep_last_step(optimizer, running)
    whole = running.chunked is not None or running.split.members()
    if whole or running.states_changed or record.filled_bytes != running.filled_bytes:
        account_states(optimizer)
        record.filled_bytes = running.filled_bytes
    report_step(optimizer)


_AFTER_STEP = torch.compiler.disable(_after_step)
"""The hook of each optimizer that ends its step."""


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure before any chunk is updated; return arguments with a closure that returns its loss."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return with_closure(args, kwargs, lambda: loss)


def _refreshing(closure: Closure, running: RunningStep) -> Closure:
    """Return a closure that sets the shards' gradients after each call; its first call may partition more parameters."""
    known = len(hollow_of(running.owner() or running.optimizer))
    first = True

    def call() -> Any:
        nonlocal first, running
        _drop_copies(parameter for parameter, _ in running.shards)  # this step may have changed them since its last call
        running.drop_gradients()
        loss = closure()
        optimizer = running.owner()
        if first and optimizer is not None and len(hollow_of(optimizer)) > known:
            now = hollow_of(optimizer)
            fresh = _begin(optimizer, now, _check(optimizer, now))
            _become(running.optimizer, fresh)
            running = fresh
        first = False
        for parameter, shard in running.shards:
            shard.grad = local_gradient(parameter)
        running.split.refresh()
        return loss

    return call
