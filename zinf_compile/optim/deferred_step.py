"""What is left of a step, done beside the next forward: exactly what would have been done at once."""

from __future__ import annotations

import collections
import copy
import logging
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import compile_lock
from zinf_compile.errors import StepFailedError
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.units.pending_updates import Span, Updates
from zinf_compile.runtime.units.unit import Unit

from .chunk_step import ChunkStep, chunk_steps
from .offloaded_states import OffloadedStates
from .record import OptimizerRecord, all_records, record_of

_log = logging.getLogger("zinf_compile")

_ENDED = "a step ended in the middle"

Settings = list[tuple[dict[str, Any], dict[str, Any]]]
"""Groups, and what they are after a step."""


class DeferredStep:
    """Chunks that are updated by a thread of their own, from the settings and gradients that were there at `step()`.

    Parameters and gradients are safe to use meanwhile: what reads a parameter waits for its update, or is handed it. What needs
    the states calls `finish_deferred` first.
    """

    def __init__(
        self, optimizer: Optimizer, sources: Sequence[OffloadedStates], step_one: Callable[[Optimizer, ChunkStep], Settings]
    ) -> None:
        self._optimizer: Optimizer | None = optimizer
        self._sources = list(sources)
        self._chunks: Generator[ChunkStep] = (chunk for source in self._sources for chunk in chunk_steps(source, optimizer))
        self.done: list[ChunkStep] = []
        """Chunks that are updated; they count all together, when the last one is."""
        self._due = [(unit, piece) for source in self._sources for unit, piece in source.pieces_due()]
        self._frozen: Optimizer | None = _freeze(optimizer)
        self._groups = list(optimizer.param_groups)
        self._step_one = step_one
        self._threads = torch.get_num_threads()
        self.pending: Pending = Done()
        """Over when no thread works on it."""
        self._updates: Updates[Unit] | None = None

    def take_first(self) -> ChunkStep:
        """Return the first chunk, which the caller updates before the start."""
        chunk = next(self._chunks)
        self.done.append(chunk)
        return chunk

    def start(self) -> None:
        """Begin."""
        spans: dict[Unit, list[Span]] = collections.defaultdict(list)
        for unit, piece in self._due:
            spans[unit].append((piece.start, piece.end))
        self._due = []
        updates = self._updates = Updates(spans)
        assert self._optimizer is not None, "it starts once"
        record = record_of(self._optimizer)
        record.mark_deferred()
        if any(state for chunk in self.done for state in chunk.scalar_states.values()):
            for source in self._sources:  # now: who takes one out of `optimizer.state` meanwhile resets it
                source.count_states(self._optimizer)
        try:
            for unit in spans:
                unit.updates = updates
            for chunk in self.done:
                for unit, piece, value in chunk.updated():
                    updates.updated(unit, piece.start, piece.end, value)
            record.deferred = self
            self.pending = self._sources[0].context.lanes.update.submit(self._run)
        except BaseException as error:  # an interrupt: nobody may wait for what isn't begun
            record.mark_ended()
            text, cause = record.incomplete or _ENDED, error
            updates.fail(lambda: _failed(text, cause))
            self._chunks.close()  # now: the error keeps this object, and later that would end another step's chunks
            raise

    def tell(self) -> None:
        """It is over: raise where it failed and nobody was told."""
        if self._updates is not None:
            self._updates.wait()

    def abandon(self) -> None:
        """Let nobody wait for it, in a forked process: the thread that works on it is not there."""
        self.pending = Done()
        if self._updates is not None:
            self._updates.abandon(lambda: StepFailedError("this process was forked from one whose step was still under way"))

    def _run(self) -> None:
        optimizer, updates = self._optimizer, self._updates
        assert optimizer is not None
        assert updates is not None
        record = record_of(optimizer)
        try:
            if torch.get_num_threads() != self._threads:  # part of the compute shape
                torch.set_num_threads(self._threads)
            self._update(optimizer, record, updates)
        except BaseException as error:  # raised by whoever needs what was to be updated
            _log.debug("a step failed", exc_info=error)
            record.mark_ended()
            cause, text = _without_frames(error), record.incomplete or _ENDED
            for unit in updates.units():
                unit.spoil(text)
            updates.fail(lambda: _failed(text, cause))
        finally:  # this object stays known by its optimizer, which it must not keep
            self._optimizer, self._frozen = None, None
            self._chunks.close()
            self._sources, self._groups, self.done = [], [], []

    def _update(self, optimizer: Optimizer, record: OptimizerRecord, updates: Updates[Unit]) -> None:
        settings: Settings = []
        assert self._frozen is not None
        for chunk in self._chunks:
            if self._sources[0].context.ending:
                raise StepFailedError("the process ends")
            with compile_lock:  # meanwhile `torch.compiler.is_compiling()` is true in all threads, and optimizers go by that
                record.mark_incomplete(type(optimizer).__name__, len(self.done) + 1)
                settings += self._step_one(self._frozen, chunk)
            for unit, piece, value in chunk.updated():
                updates.updated(unit, piece.start, piece.end, value)
            self.done.append(chunk)
        for chunk in self.done:
            chunk.commit(optimizer)
        _merge(self._groups, self._frozen.param_groups, settings)
        for source in self._sources:
            source.finish(optimizer)
        updates.close()
        record.mark_whole()


def finish_deferred(optimizer: Optimizer, *, tell: bool = True) -> None:
    """Return when the optimizer's last step is over; where it failed and nobody was told, raise `StepFailedError`.

    `tell=False`, where the states are about to be replaced: then whoever next reads a parameter that isn't replaced too is told.
    """
    record = record_of(optimizer)
    deferred: DeferredStep | None = record.deferred
    if deferred is not None:
        deferred.pending.wait()  # an interrupt here leaves it known
        record.deferred = None
        if tell:
            deferred.tell()


def synchronize() -> None:
    """Return when nothing is left to do of any optimizer's last step on this rank.

    With parameters, gradients and states on NVMe a step goes on while the next forward runs. Everything that needs its results
    waits by itself: call this to time steps, or to have a step's error here and now. Raises `StepFailedError` for a step that
    failed, unless somebody was told already.
    """
    for optimizer, record in all_records():
        if record.deferred is not None:
            finish_deferred(optimizer)


def end_deferred_steps() -> None:
    """Return when no step goes on any more; of contexts that are `ending`, each ends at its next chunk, and nobody is told."""
    for _, record in all_records():
        deferred: DeferredStep | None = record.deferred
        if deferred is not None:
            try:
                deferred.pending.wait()
            except Exception as error:
                _log.debug("a step failed that nobody needs any more", exc_info=error)


def _forked() -> None:
    """In a child process nobody ends the steps that were under way when it was made."""
    for _, record in all_records():
        if record.deferred is not None:
            record.deferred.abandon()


os.register_at_fork(after_in_child=_forked)


def _freeze(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the settings of this moment, for stand-ins to be made from."""
    frozen: Optimizer = object.__new__(type(optimizer))
    # tensors among these, too, may change as soon as the step has returned: a GradScaler's scale
    vars(frozen).update({k: _copy_tensor(v) for k, v in vars(optimizer).items() if k not in ("param_groups", "state")})
    frozen.param_groups = [{k: _copy(v) for k, v in group.items()} for group in optimizer.param_groups]
    frozen.state = collections.defaultdict(dict)
    return frozen


def _copy(value: Any) -> Any:
    return _copy_tensor(value) if isinstance(value, torch.Tensor) else copy.copy(value)


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _merge(groups: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], settings: Settings) -> None:
    """Let a group have what its chunks' steps made of it, but for what somebody, as a schedule does, has set since."""
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
    """Return the error without tracebacks: their frames hold the optimizer, and nobody may ever ask for the error."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def _failed(text: str, cause: BaseException) -> StepFailedError:
    error = StepFailedError(f"{text}. Cause: {cause}")
    error.__cause__ = cause
    return error
