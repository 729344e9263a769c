"""Deferred steps: chunks updated by a worker thread during the next forward, bitwise equal to updating them in `step()`.

Note: Deferred step
    `step()` updates one chunk, or those that can't be deferred, marks the parameters of the others as pending
    (`runtime/units/pending_updates.py`) and submits the chunks to the `update` lane. A read of a pending shard waits for its
    update, or receives the updated value from memory. The worker uses copies of the settings and snapshots of the gradients
    (`step_gradient.py`), which nobody changes before they are applied. On a device it issues to a stream of its own, after what
    was issued before `step()`. It commits all chunks to `optimizer.state` together at the end. Readers of states call
    `finish_deferred` first. Readers of the step's results raise its error; its parameters stay unusable until loaded.
    Gradients in memory are there beside the next forward; a backward waits until they are applied, and so does a graph that has
    no room beside them (`runtime/memory/pending_gradients.py`). A save that begins meanwhile takes what is still to be updated
    from the worker, chunk by chunk (`step_saves.py`).
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import compile_lock
from zinf_compile.errors import StepFailedError
from zinf_compile.ir.pieces import Piece
from zinf_compile.ir.sizes import Sides
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.system.accelerator import current_stream
from zinf_compile.runtime.units.pending_updates import Span, Updates
from zinf_compile.runtime.units.unit import Unit

from .chunk_step import ChunkStep, chunk_steps
from .offloaded_states import OffloadedStates
from .record import OptimizerRecord, all_records, record_of
from .step_saves import StepSave, StepSaves, copied

_log = logging.getLogger("zinf_compile")

_ENDED = "a step ended in the middle"

Settings = list[tuple[dict[str, Any], dict[str, Any]]]
"""Groups, with their settings after a step."""


class DeferredStep:
    """The chunks of one step that a worker thread updates; see Note: Deferred step."""

    def __init__(
        self,
        optimizer: Optimizer,
        sources: Sequence[OffloadedStates],
        step_together: Callable[[Optimizer, Sequence[ChunkStep]], Settings],
    ) -> None:
        self._optimizer: Optimizer | None = optimizer
        self._sources = list(sources)
        self._calls: Generator[list[ChunkStep]] = (call for source in self._sources for call in chunk_steps(source, optimizer))
        self.done: list[ChunkStep] = []
        """Updated chunks, committed together after the last one."""
        self._due: dict[Hashable, list[tuple[Unit, Piece]]] = collections.defaultdict(list)
        """The pieces of chunks that are not updated yet, by what a save knows the chunk's states by."""
        for owner, unit, piece in [due for source in self._sources for due in source.pieces_due()]:
            self._due[owner].append((unit, piece))
        self._snapshot: Optimizer | None = _with_settings_now(optimizer)
        self._groups = list(optimizer.param_groups)
        self._step_together = step_together
        self._threads = torch.get_num_threads()
        self._device = self._sources[0].context.device
        self._contexts = list(dict.fromkeys(source.context for source in self._sources))
        self._before: torch.Event | None = None
        self.pending: Pending = Done()
        """Done when no thread works on the step."""
        self.updates: Updates[Unit] | None = None
        """Of its parameters; None before `start`."""
        self._saves = StepSaves()
        self._adds_states = True
        """Small states, such as step counts, may be new after it."""

    def take_first(self) -> ChunkStep:
        """Return the first chunk, which the caller updates before `start`."""
        (chunk,) = next(self._calls)
        self.done.append(chunk)
        return chunk

    def start(self) -> None:
        """Mark the parameters as pending and submit the remaining chunks to the worker."""
        spans: dict[Unit, list[Span]] = collections.defaultdict(list)
        for unit, piece in itertools.chain.from_iterable(self._due.values()):
            spans[unit].append((piece.start, piece.end))
        for chunk in self.done:
            del self._due[chunk.owner]
        updates = self.updates = Updates(spans)
        issued = current_stream(self._device)
        self._before = None if issued is None else issued.record_event()
        assert self._optimizer is not None, "it starts once"
        record = record_of(self._optimizer)
        record.mark_deferred()
        creates = any(state for chunk in self.done for state in chunk.scalar_states.values())
        self._adds_states = creates or not self.done
        for source in self._sources:  # before the update: deleting an entry meanwhile then resets the state
            source.leave_states(self._optimizer, creates=creates)
        for context in self._contexts:
            context.memory.pending_gradients.add(self)
        try:
            for unit in spans:
                unit.updates = updates
            for chunk in self.done:
                chunk.report(updates)
            record.deferred = self
            self.pending = self._sources[0].context.lanes.update.submit(self._run)
        except BaseException as error:  # an interrupt: nothing may wait for a step that never runs
            record.mark_ended()
            text, cause = record.incomplete or _ENDED, error
            for unit in spans:
                unit.spoil(text)
            updates.fail(lambda: _failed(text, cause))
            self._saves.fail()
            self._due = {}
            self._calls.close()  # the error keeps this object alive; closed later, it would end the chunks of another step
            self._let_go()
            raise

    def raise_failure(self) -> None:
        """After the step: raise its error, unless that was raised before."""
        if self.updates is not None:
            self.updates.wait()

    @property
    def is_told(self) -> bool:
        """Whether it has failed, and its error was raised."""
        return self.updates is not None and self.updates.is_told

    def abandon(self) -> None:
        """Fail the pending updates, in a forked process: the worker thread doesn't exist there."""
        self.pending = Done()
        self._let_go()
        self._saves.abandon()
        if self.updates is not None:
            self.updates.abandon(lambda: StepFailedError("this process was forked from one whose step was still under way"))

    def being_saved(self, optimizer: Optimizer) -> list[OffloadedStates]:
        """Return what of the optimizer's it updates, if a save may begin now and take from it what is still to be updated.

        Nothing where it is over, and where states or groups were replaced since `step()`, or states may be new after it.
        """
        sources = self._sources  # of the thread that updates, which replaces the list at the end
        if self._saves.is_over or any(mine is not now for mine, now in zip(self._groups, optimizer.param_groups, strict=False)):
            return []
        settled = all(source.table.is_settled(optimizer, source.due, adds=self._adds_states) for source in sources)
        return sources if settled else []

    def let_save(self, save: StepSave, optimizer: Optimizer) -> None:
        """Let a save that is about to begin take what is still to be updated, see `StepSaves.begin`."""
        self._saves.begin(save, optimizer, self._device, self._places_due)

    def _places_due(self) -> Iterator[tuple[Hashable, int, int]]:
        for owner, pieces in self._due.items():
            yield owner, 0, sys.maxsize
            for unit, piece in pieces:
                yield unit, piece.start, piece.end

    def gradient_bytes(self) -> Sides:
        """See `GradientHolder.gradient_bytes`."""
        total = Sides(0, 0)
        for gradient in [gradient for source in self._sources for gradient in list(source.gradients.values())]:
            total = total.plus(gradient.bytes)
        return self._contexts[0].link.topology.counted(total) if self._contexts else total

    def settle(self) -> None:
        """See `GradientHolder.settle`."""
        if self.updates is not None:
            self.updates.settle()

    def _let_go(self) -> None:
        for context in self._contexts:
            context.memory.pending_gradients.remove(self)
        self._contexts = []

    def _run(self) -> None:
        optimizer, updates = self._optimizer, self.updates
        assert optimizer is not None
        assert updates is not None
        record = record_of(optimizer)
        try:
            if torch.get_num_threads() != self._threads:  # part of the compute shape
                torch.set_num_threads(self._threads)
            with self._beside_compute():
                self._update(optimizer, record, updates)
        except BaseException as error:  # raised by readers of the parameters
            _log.debug("a step failed", exc_info=error)
            record.mark_ended()
            cause, text = _without_frames(error), record.incomplete or _ENDED
            for unit in updates.units():
                unit.spoil(text)
            updates.fail(lambda: _failed(text, cause))
            self._saves.fail()
        finally:  # the optimizer's record refers to this object: break the cycle
            self._optimizer, self._snapshot = None, None
            self._calls.close()
            self._let_go()
            self._sources, self._groups, self.done, self._due = [], [], [], {}

    @contextlib.contextmanager
    def _beside_compute(self) -> Iterator[None]:
        """Context on a stream that comes after what was issued before `step()`, such as settings that are tensors."""
        context = self._sources[0].context
        stream = context.lanes.update_stream(context.device)
        if stream is None:
            yield
            return
        assert self._before is not None, "noted when the step began"
        stream.wait_event(self._before)
        with stream:
            try:
                yield
            finally:
                stream.synchronize()  # copies of settings are freed in the order of another stream

    def _update(self, optimizer: Optimizer, record: OptimizerRecord, updates: Updates[Unit]) -> None:
        settings: Settings = []
        assert self._snapshot is not None
        for together in self._calls:
            if self._sources[0].context.ending:
                raise StepFailedError("the process ends")
            with compile_lock:  # while Dynamo compiles, `is_compiling()` is true in all threads, and optimizers branch on it
                record.mark_incomplete(type(optimizer).__name__, len(self.done) + 1)
                settings += self._step_together(self._snapshot, together)
            with self._saves.reporting() as saves:
                for chunk in together:
                    for save in saves:
                        chunk.hand_to(save)
                    chunk.report(updates)
                    del self._due[chunk.owner]
            self.done += together
        for chunk in self.done:
            chunk.commit(optimizer)
        _merge(self._groups, self._snapshot.param_groups, settings)
        for source in self._sources:
            source.finish(optimizer)
        issued = current_stream(self._device)
        if issued is not None:
            issued.synchronize()  # readers are no longer ordered after what is copied to the device
        before = self._snapshot.param_groups
        self._saves.end(lambda groups: _merge(groups, before, settings), self._device)
        updates.close()
        record.mark_whole()


def finish_deferred(optimizer: Optimizer, *, report: bool = True) -> None:
    """Wait for the optimizer's last step; raise its error as `StepFailedError`, unless that was raised before.

    `report=False`, before states are replaced: the error is left to the next reader of a parameter that isn't replaced too.
    """
    record = record_of(optimizer)
    deferred: DeferredStep | None = record.deferred
    if deferred is not None:
        deferred.pending.wait()  # an interrupt here keeps `record.deferred`
        record.deferred = None
        for source in record.offloaded or []:
            source.table.aside.put_back(optimizer)
        if report:
            deferred.raise_failure()


def synchronize() -> None:
    """Wait until the last step of every optimizer on this rank is complete.

    Where the host updates what a device computes with, or drives are waited for, a step continues during the next forward. All
    readers of its results wait by themselves: call this to time steps, or to get a step's error here. Raises `StepFailedError`
    for a step that failed, unless that error was raised before.
    """
    for optimizer, record in all_records():
        if record.deferred is not None:
            finish_deferred(optimizer)


def end_deferred_steps() -> None:
    """Wait until no deferred step runs; in contexts that are `ending`, each stops at its next chunk. Errors are only logged."""
    for _, record in all_records():
        deferred: DeferredStep | None = record.deferred
        if deferred is not None:
            try:
                deferred.pending.wait()
            except Exception as error:
                _log.debug("a deferred step failed while the process ended", exc_info=error)


def _forked() -> None:
    """Abandon, in a child process, the deferred steps of its parent."""
    for _, record in all_records():
        if record.deferred is not None:
            record.deferred.abandon()


os.register_at_fork(after_in_child=_forked)


def _with_settings_now(optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer with its current settings, from which stand-ins are made."""
    frozen: Optimizer = object.__new__(type(optimizer))
    # tensor attributes may change once `step()` has returned, such as a GradScaler's scale
    vars(frozen).update({k: _copy_tensor(v) for k, v in vars(optimizer).items() if k not in ("param_groups", "state")})
    frozen.param_groups = [{k: copied(v) for k, v in group.items()} for group in optimizer.param_groups]
    frozen.state = collections.defaultdict(dict)
    return frozen


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _merge(groups: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], settings: Settings) -> None:
    """Apply the settings that the chunks' steps changed, except those set since by others, such as a scheduler."""
    where = {id(group): number for number, group in enumerate(before)}
    for frozen, after in settings:
        now, then = groups[where[id(frozen)]], before[where[id(frozen)]]
        for name, value in after.items():
            if value is not then.get(name) and _same(now.get(name), then.get(name)):
                now[name] = value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def _without_frames(error: BaseException) -> BaseException:
    """Return the error without tracebacks: their frames refer to the optimizer, and the error may never be raised."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _failed(text: str, cause: BaseException) -> StepFailedError:
    error = StepFailedError(f"{text}. Cause: {cause}")
    error.__cause__ = cause
    return error
