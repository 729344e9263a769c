"""Updates of shards that a deferred step makes beside the next forward.

Readers of a unit wait here, or are handed the values as they are updated. Knows no optimizer.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
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
        self._landings: dict[U, list[_Landing]] = {}
        self._lock = threading.RLock()  # entered directly: Ctrl-C may leave a condition locked
        self._changed = threading.Condition(self._lock)
        self._failure: Callable[[], Exception] | None = None
        self._told = False
        self._spoiled: weakref.WeakSet[U] = weakref.WeakSet()
        """After a failure: units that may be updated in part, and were not replaced since."""
        self._worker: WorkerWaits | None = None
        """Waits of the thread that updates."""
        self.spared_bytes = 0
        """Bytes that were handed to readers when they were updated, and not read from drives."""

    def updated(self, unit: U, start: int, end: int, value: torch.Tensor) -> None:
        """Note an updated span; its write to the unit's backing has begun. `value` may change once this returns."""
        with self._lock:
            self._worker = worker() or self._worker
            self._left[unit].discard((start, end))
            landings = list(self._landings.get(unit, ()))
        landings = [landing for landing in landings if (start, end) in landing.missing]
        for landing in landings:
            landing.into[start - landing.start : end - landing.start].copy_(value)
        with self._lock:
            for landing in landings:
                landing.missing.discard((start, end))
                if not landing.missing:  # its memory is the reader's alone
                    self._landings[unit].remove(landing)
                self.spared_bytes += -(-value.nbytes // _PAGE) * _PAGE
            if not self._left[unit]:
                del self._left[unit]
                self._landings.pop(unit, None)
            self._changed.notify_all()

    def fail(self, failure: Callable[[], Exception]) -> None:
        """End all waits with an error, which `failure` makes."""
        with self._lock:
            self._failure = failure
            self._spoiled.update(self._spans)
            self._left.clear()
            self._landings.clear()
            self._spans.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all units: they are updated."""
        with self._lock:
            assert not self._left, "all spans were updated"
            self._spans.clear()

    def read(self, unit: U, into: torch.Tensor, first: int = 0) -> Pending:
        """Start to fill `into`, in host memory, with the updated shard: from its backing, or as its spans are updated.

        Or with what of it begins at `first`, where a span does, and ends where one does.
        """
        assert isinstance(unit.backing, NvmeBacking), "what is in memory is updated at once"
        last = first + into.numel()
        with self._lock:
            self._raise_once()
            landing = _Landing(self, into, first, [s for s in self._left.get(unit, ()) if first <= s[0] < last])
            if landing.missing:
                self._landings.setdefault(unit, []).append(landing)
            spans = [span for span in self._spans.get(unit, ()) if first <= span[0] < last]
            kept = [span for span in spans if span not in landing.missing]
        if not landing.missing:
            return unit.backing.read(into, first)
        return All([*(unit.backing.read(into[start - first : end - first], start) for start, end in kept), landing])

    def wait(self, unit: U | None = None) -> None:
        """Wait until a unit, or all of them, are updated; raise the failure where nobody was told."""
        with self._lock:
            self._wait_for(lambda: unit not in self._left if unit is not None else not self._left)
            self._raise_once()

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

    def abandon(self, failure: Callable[[], Exception]) -> None:
        """In a forked child: fail, since the thread that updates is not here."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        if self._left:
            self.fail(failure)

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

    def _raise_once(self) -> None:
        if self._failure is not None and not self._told:
            self._told = True
            raise self._failure()

    def _land(self, landing: _Landing) -> None:
        with self._lock:
            self._wait_for(lambda: not landing.missing or self._failure is not None)
            if landing.missing:
                self._told = True
                assert self._failure is not None, "waited for"
                raise self._failure()


class _Landing:
    """Memory that updated spans are handed to."""

    def __init__(self, updates: Updates[Any], into: torch.Tensor, start: int, missing: Iterable[Span]) -> None:
        self._updates = updates
        self.into = into
        self.start = start
        self.missing = set(missing)

    def wait(self) -> None:
        self._updates._land(self)
