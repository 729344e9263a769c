"""Updates of shards that a deferred step makes beside the next forward.

Readers of a unit wait here, are handed the values as they are updated, or leave here what to begin then. Knows no optimizer.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from zinf_compile._torch import compile_lock
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.lanes.lanes import All, Pending
from zinf_compile.runtime.lanes.wait_times import WorkerWaits, worker

from .backing import NvmeBacking, ShardBacking

Span = tuple[int, int]
"""A range [start, end) of a shard, in elements."""

_PAGE = 4096


class Updated(Protocol):
    """A `Unit`, as far as it is updated."""

    backing: ShardBacking | None


U = TypeVar("U", bound=Updated)


class Updates(Generic[U]):
    """Spans that a step has still to update. Readers of a shard get its updated values.

    One thread updates and calls `updated`; any thread may read and wait. After a failure all waits are over: the first one to
    return raises it, and so does each read that it cut short.
    """

    def __init__(self, due: Mapping[U, Iterable[Span]]) -> None:
        self._spans: dict[U, list[Span]] = {unit: list(spans) for unit, spans in due.items()}
        self._left: dict[U, set[Span]] = {unit: set(spans) for unit, spans in self._spans.items()}
        self._awaited: dict[U, list[_Spans]] = {}
        self._arriving: dict[U, list[Pending]] = {}
        """Copies of updated spans to where the shard lives, until the whole step is over."""
        self._lock = threading.RLock()  # entered directly: Ctrl-C may leave a condition locked
        self._changed = threading.Condition(self._lock)
        self._failure: Callable[[], Exception] | None = None
        self._told = False
        self._spoiled: weakref.WeakSet[U] = weakref.WeakSet()
        """After a failure: units that may be updated in part, and were not replaced since."""
        self._worker: WorkerWaits | None = None
        """Waits of the thread that updates."""
        self.is_over = False
        """Whether all is updated, and where it lives: nobody has to wait for anything any more."""
        self.spared_bytes = 0
        """Bytes that were handed to readers when they were updated, and not read from drives."""

    def updated(self, unit: U, start: int, end: int, value: torch.Tensor, arriving: Sequence[Pending] = ()) -> None:
        """Note an updated span; its transfers to the unit's backing have begun. `value` may change once this returns.

        `arriving`: those to memory, which readers of that have to wait for.
        """
        with self._lock:
            self._worker = worker() or self._worker
            self._left[unit].discard((start, end))
            awaited = [each for each in self._awaited.get(unit, ()) if (start, end) in each.missing]
        for each in awaited:
            if each.into is not None:
                each.into[start - each.start : end - each.start].copy_(value)
        begun: list[Begun] = []
        with self._lock:
            self._arriving.setdefault(unit, []).extend(arriving)
            for each in awaited:
                each.missing.discard((start, end))
                if not each.missing:  # its memory is the reader's alone
                    self._awaited[unit].remove(each)
                    begun += [transfer for transfer in each.then if transfer.may_begin]
                self.spared_bytes += -(-value.nbytes // _PAGE) * _PAGE if each.into is not None else 0
            if not self._left[unit]:
                del self._left[unit]
                self._awaited.pop(unit, None)
            self._changed.notify_all()
        for transfer in begun:
            transfer.begin()

    def fail(self, failure: Callable[[], Exception]) -> None:
        """End all waits with an error, which `failure` makes."""
        with self._lock:
            self._failure = failure
            self._spoiled.update(self._spans)
            for kept in (self._left, self._awaited, self._spans, self._arriving):
                kept.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all units: they are updated, and where they live."""
        with self._lock:
            assert not self._left, "all spans were updated"
            self._spans.clear()
            self._arriving.clear()
            self.is_over = True
            self._changed.notify_all()

    def read(self, unit: U, into: torch.Tensor, first: int = 0) -> Pending:
        """Start to fill `into`, in host memory, with the updated shard: from its backing, or as its spans are updated.

        Or with what of it begins at `first`, where a span does, and ends where one does.
        """
        assert isinstance(unit.backing, NvmeBacking), "who reads memory waits for its update"
        last = first + into.numel()
        with self._lock:
            self._raise_once(unit)
            landing = self._await(unit, first, last, into)
            spans = [span for span in self._spans.get(unit, ()) if first <= span[0] < last]
            kept = [span for span in spans if span not in landing.missing]
        if not landing.missing:
            return unit.backing.read(into, first)
        return All([*(unit.backing.read(into[start - first : end - first], start) for start, end in kept), landing])

    def begin_after(self, read: Sequence[tuple[U, int, int]], begin: Callable[[], Pending]) -> Pending:
        """Begin a transfer that reads elements [first, last) of some units once they are updated; return what to wait for.

        Now, or on the thread that updates: no lane is held up meanwhile, which that thread may need.
        """
        with self._lock:
            for unit, _, _ in read:
                self._raise_once(unit)
            awaited = [spans for row in read if (spans := self._await(*row)).missing]
            if awaited:
                begun = Begun(self, awaited, begin)
                for spans in awaited:
                    spans.then.append(begun)
                return begun
        for row in read:
            arriving = self.arrival(*row)
            if arriving is not None:
                arriving.wait()
        return begin()

    def arrival(self, unit: U, first: int = 0, last: int | None = None) -> Pending | None:
        """Return what orders a reader of the shard in memory after its update, for a lane or the caller; None: nothing does."""
        with self._lock:
            if self._failure is not None or self._is_due(unit, first, last):
                return _Arrival(self, unit, first, last)
            arriving = self._arriving.get(unit)
            return All(list(arriving)) if arriving else None

    def wait(self, unit: U | None = None, first: int = 0, last: int | None = None) -> None:
        """Wait until a unit, elements [first, last) of it, or all units are updated; raise the failure where nobody was told.

        What the caller issues next on its current stream comes after copies of the unit that are under way.
        """
        with self._lock:
            self._wait_for(lambda: not self._is_due(unit, first, last) if unit is not None else not self._left)
            self._raise_once(unit)
            arriving = list(self._arriving.get(unit, ())) if unit is not None else []
        for pending in arriving:
            pending.wait()

    def wait_arrived(self, unit: U) -> None:
        """Wait for copies of updated spans that are under way, as those do that the caller issues next on its current stream."""
        with self._lock:
            arriving = list(self._arriving.get(unit, ()))
        for pending in arriving:
            pending.wait()

    @property
    def is_told(self) -> bool:
        """Whether it has failed, and somebody was told."""
        with self._lock:
            return self._failure is not None and self._told

    def settle(self, unit: U | None = None) -> None:
        """Wait until a unit, or all of them, are updated or never will be; who doesn't read parameters or states isn't told."""
        with self._lock:
            self._wait_for(lambda: unit not in self._left if unit is not None else not self._left)

    def settle_all(self) -> None:
        """Wait until the step has failed, or all that it has updated is where it lives; see `settle`."""
        with self._lock:
            self._wait_for(lambda: self.is_over or self._failure is not None)

    def units(self) -> list[U]:
        """Return the units that are to be updated."""
        with self._lock:
            return list(self._spans)

    def tell(self) -> None:
        """Raise the failure, where nobody was told."""
        with self._lock:
            self._raise_once()

    def replace(self, unit: U) -> None:
        """Wait until a unit is no longer updated: its value is about to be replaced, so a failure doesn't count."""
        with self._lock:
            self._wait_for(lambda: unit not in self._left)
            self._spoiled.discard(unit)
            self._told = self._told or (self._failure is not None and not self._spoiled)
            arriving = list(self._arriving.get(unit, ()))
        for pending in arriving:
            pending.wait()

    def abandon(self, failure: Callable[[], Exception]) -> None:
        """In a forked child: fail, since the thread that updates is not here."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        if self._left:
            self.fail(failure)
        self.is_over = self._failure is None

    def _wait_for(self, over: Callable[[], bool]) -> None:
        if not over() and compile_lock._is_owned():  # type: ignore[attr-defined]
            raise PartitionedParameterError(
                "a parameter is read while a graph is compiled, and the last step, which waits for that, has still to update it: "
                "call zinf_compile.synchronize() before"
            )
        if not over():
            start = time.perf_counter()
            self._changed.wait_for(over)
            if self._worker is not None:
                self._worker.record(start)

    def _is_due(self, unit: U, first: int, last: int | None) -> bool:
        return any(first < end and (last is None or start < last) for start, end in self._left.get(unit, ()))

    def _await(self, unit: U, first: int, last: int, into: torch.Tensor | None = None) -> _Spans:
        """Return the spans within elements [first, last) that are to be updated, filled into memory as they are."""
        missing = [(start, end) for start, end in self._left.get(unit, ()) if start < last and first < end]
        spans = _Spans(self, into, first, missing)
        if missing:
            self._awaited.setdefault(unit, []).append(spans)
        return spans

    def _raise_once(self, unit: U | None = None) -> None:
        if self._failure is not None and not self._told and (unit is None or unit in self._spoiled):
            self._told = True
            raise self._failure()

    def _land(self, spans: _Spans) -> None:
        with self._lock:
            self._wait_for(lambda: not spans.missing or self._failure is not None)
            if spans.missing:
                self._told = True
                assert self._failure is not None, "waited for"
                raise self._failure()

    def _wait_begun(self, begun: Begun) -> None:
        with self._lock:
            self._wait_for(lambda: begun.is_over)

    def _note(self) -> None:
        with self._lock:
            self._changed.notify_all()


class _Spans:
    """Spans that somebody waits for; with memory that they are handed to."""

    def __init__(self, updates: Updates[Any], into: torch.Tensor | None, start: int, missing: Iterable[Span]) -> None:
        self.updates = updates
        self.into = into
        self.start = start
        self.missing = set(missing)
        self.then: list[Begun] = []
        """Transfers to begin when the last one is updated."""

    def wait(self) -> None:
        self.updates._land(self)


class Begun:
    """A transfer that begins when all of some spans are updated."""

    def __init__(self, updates: Updates[Any], spans: Sequence[_Spans], begin: Callable[[], Pending]) -> None:
        self._updates, self._spans = updates, spans
        self._begin: Callable[[], Pending] | None = begin
        self._transfer: Pending | None = None
        self._error: Exception | None = None

    @property
    def awaited(self) -> Pending | None:
        """The transfer, once it has begun."""
        return self._transfer

    @property
    def may_begin(self) -> bool:
        """Whether all is updated that it reads."""
        return not any(spans.missing for spans in self._spans)

    @property
    def is_over(self) -> bool:
        """Whether it has begun, or failed to."""
        return self._transfer is not None or self._error is not None

    def begin(self) -> None:
        """Begin it, on the thread that updates; an error is that of who waits."""
        begin, self._begin = self._begin, None
        assert begin is not None, "it begins once"
        try:
            self._transfer = begin()
        except Exception as error:
            self._error = error
        self._updates._note()

    def wait(self) -> None:
        """See `Pending.wait`."""
        if not self.is_over:
            for spans in self._spans:
                spans.wait()
            self._updates._wait_begun(self)
        if self._error is not None:
            raise self._error
        assert self._transfer is not None
        self._transfer.wait()


class _Arrival:
    """The end of a unit's update, for who reads its shard in memory."""

    def __init__(self, updates: Updates[Any], unit: Any, first: int, last: int | None) -> None:
        self._updates, self._unit, self._first, self._last = updates, unit, first, last

    def wait(self) -> None:
        self._updates.wait(self._unit, self._first, self._last)


def begin_after_landing(before: Pending | None, begin: Callable[[], Pending]) -> Pending:
    """Begin a transfer that comes after a read of a shard: where some of that is handed over by an update, when it is."""
    for part in before.parts if isinstance(before, All) else [before]:
        if isinstance(part, _Spans):
            updates = part.updates
            with updates._lock:
                if part.missing and updates._failure is None:
                    begun = Begun(updates, [part], begin)
                    part.then.append(begun)
                    return begun
    return begin()
