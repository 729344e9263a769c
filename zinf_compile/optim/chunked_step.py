"""The chunked part of a step: updated in `step()`, or deferred to the next forward."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import BudgetError, StepFailedError, UnsupportedOptimizerError
from zinf_compile.sharded.parameter import ShardedParameter

from .chunk_step import ChunkStep, chunk_steps
from .deferred_step import DeferredStep
from .offloaded_states import OffloadedStates
from .record import record_of, spoil_updated
from .stand_in import make_stand_in, settings_of


@dataclasses.dataclass(slots=True)
class ChunkedStep:
    """The chunks of one step, and the settings that their updates changed."""

    chunks: list[ChunkStep]
    """In the order of updates; the caller's own `step` updates the last one, on the stand-in."""
    sources: Sequence[OffloadedStates]
    settings: list[tuple[dict[str, Any], dict[str, Any]]]
    """Groups, with the settings that the other chunks' steps changed; applied when the whole step is over."""
    deferred: DeferredStep | None = None
    """Chunks deferred to the next forward."""


@contextlib.contextmanager
def explaining_progress(optimizer: Optimizer) -> Iterator[None]:
    """Context that turns errors into `StepFailedError`s saying what is updated; refusals before any update pass unchanged."""
    try:
        yield
    except StepFailedError:
        raise
    except Exception as error:
        record = record_of(optimizer)
        if record.incomplete is None and isinstance(error, BudgetError | UnsupportedOptimizerError):
            raise
        if record.incomplete is not None:
            record.mark_ended()
            spoil_updated(optimizer)
        done = record.incomplete or "nothing is updated yet, parameters and states are as before this step"
        raise StepFailedError(f"{done}. Cause: {error}") from error


def begin_chunks(optimizer: Optimizer, sources: Sequence[OffloadedStates]) -> ChunkedStep | None:
    """Update all chunks but the last, which the caller's own step updates; return None without chunks."""
    if not sources:
        return None
    record, name = record_of(optimizer), type(optimizer).__name__
    if record.incomplete is not None:
        raise StepFailedError(record.incomplete)
    chunked = ChunkedStep([], sources, [])
    chunks = chunked.chunks
    with torch.no_grad(), contextlib.ExitStack() as failing:
        for source in sources:
            source.begin(optimizer)
            failing.callback(source.stop_expecting)
        now = [source for source in sources if not source.deferrable]
        due = sum(source.chunks_due for source in now)
        for together in (call for source in now for call in chunk_steps(source, optimizer)):
            chunks += together
            if len(chunks) < due:
                record.mark_incomplete(name, len(chunks))
                chunked.settings += _step_together(optimizer, together)
        if len(now) < len(sources):
            chunked.deferred = DeferredStep(optimizer, [source for source in sources if source.deferrable], _step_together)
            if not chunks:
                chunks.append(chunked.deferred.take_first())
        failing.pop_all()
    if not chunks:
        return None
    record.mark_incomplete(name, len(chunks))
    return chunked


def _step_together(optimizer: Optimizer, chunks: Sequence[ChunkStep]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Update chunks in one call of the optimizer's `step`; return their groups with their settings after it."""
    parts: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
    for parameter, part in (row for chunk in chunks for row in chunk.parts):
        parts[id(parameter)].append(part)
    stand_in, groups = make_stand_in(optimizer, parts, without_members=lambda group: False)
    for chunk in chunks:
        stand_in.state.update(chunk.state)
    vars(stand_in)["_optimizer_step_pre_hooks"] = collections.OrderedDict()  # user hooks run once per whole step
    vars(stand_in)["_optimizer_step_post_hooks"] = collections.OrderedDict()
    with chunks[0].timed(chunks[-1]):
        type(stand_in).step(stand_in)
        for chunk in chunks:
            chunk.finish(stand_in.state)
    return [(mine, settings_of(theirs)) for mine, theirs in zip(groups, stand_in.param_groups, strict=True)]


def _commit(chunks: Sequence[ChunkStep], optimizer: Optimizer) -> None:
    """Commit the states of chunks, parameter by parameter: the entries that a first step makes are in eager's order."""
    of_parameter: dict[ShardedParameter, list[ChunkStep]] = collections.defaultdict(list)
    for chunk in chunks:
        for parameter in chunk.scalar_states:
            of_parameter[parameter].append(chunk)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for chunk in of_parameter.get(parameter, ()):
                chunk.commit_of(parameter, optimizer)


def finish_chunks(optimizer: Optimizer, chunked: ChunkedStep, stand_in: Optimizer) -> None:
    """After the caller's own step: write back the last chunk and commit all chunks, or start the deferred ones."""
    last = chunked.chunks[-1]
    last.finish(stand_in.state)
    for mine, changed in chunked.settings:
        mine.update(changed)
    deferred = chunked.deferred
    _commit([chunk for chunk in chunked.chunks if deferred is None or chunk not in deferred.done], optimizer)
    for parameter in {p for source in chunked.sources for p in source.due}:
        torch.autograd.graph.increment_version(parameter)
    for source in chunked.sources:
        if not source.deferrable:
            source.finish(optimizer)
    if deferred is not None:
        deferred.start()
    else:
        record_of(optimizer).mark_whole()
