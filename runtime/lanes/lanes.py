"""One lane per link: transfers on a lane run one after the other, beside compute and beside the other lanes."""

from __future__ import annotations

import atexit
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from .overlap_log import Spans, timed
from .wait_times import WorkerWaits, work_for

MOST_UNDER_WAY = 4
"""Transfers of one lane that may hold their buffers at a time; the next one waits for the oldest."""

POLL_S, PATIENCE_S = 0.001, 0.02
"""Seconds after which a lane looks again whether a copy has arrived; and for which it leaves room for one that arrives earlier to
be named, before it waits for this one alone."""

_CPU = torch.device("cpu")


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the result may be used by what the caller issues next; raise what the transfer raised."""


class Lane(Protocol):
    """Performs transfers in order."""

    log: Spans | None
    """Log of start and end of each transfer submitted from now on, of lanes of the CPU; None: none is kept."""

    def submit(
        self, transfer: Callable[[], None], *, after: Sequence[Pending] = (), ended: Callable[[], None] | None = None
    ) -> Pending:
        """Start `transfer` after everything submitted before it, and after other transfers, of any lane or drive.

        `ended` gives back what the transfer took: it is called once this is over, and also where it is left out, because an
        earlier one has failed.
        """


def wait_for_all(waits: Iterable[Callable[[], None]]) -> None:
    """Call every one of `waits`; then raise the first error that one of them raised."""
    error: Exception | None = None
    for wait in waits:
        try:
            wait()
        except Exception as failed:
            error = error or failed
    if error is not None:
        raise error


class Done:
    """A transfer that is over."""

    def wait(self) -> None:
        """Return at once."""


class All:
    """Several transfers as one."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Pending]) -> None:
        self.parts = parts

    @classmethod
    def begun(cls, transfers: Iterable[Pending]) -> All:
        """Return transfers that begin as they are asked for; where one raises, those that have begun are waited for first."""
        parts: list[Pending] = []
        try:
            for transfer in transfers:
                parts.append(transfer)
        except BaseException:
            cls(parts).wait()
            raise
        return cls(parts)

    def wait(self) -> None:
        """Return when all are over; raise the first one's error, after all have ended."""
        wait_for_all(part.wait for part in self.parts)


class Job:
    """A transfer on a `ThreadLane`."""

    def __init__(
        self, transfer: Callable[[], None], after: Sequence[Pending], waits: WorkerWaits, ended: Callable[[], None] | None
    ) -> None:
        self._transfer: Callable[[], None] | None = transfer
        self._after = after
        self._ended = ended
        self._waits = waits
        self._running = threading.Lock()  # no event: Ctrl-C in a wait for one may leave it locked
        self._running.acquire()
        self._error: BaseException | None = None

    def run(self, earlier: BaseException | None) -> BaseException | None:
        """Perform it, on the lane's thread, unless an `earlier` one has failed; return the error."""
        try:
            if earlier is not None:
                raise earlier
            assert self._transfer is not None
            for pending in self._after:
                pending.wait()
            self._transfer()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            self._transfer, self._after = None, ()
            ended, self._ended = self._ended, None
            try:
                if ended is not None:
                    ended()
            finally:
                self._running.release()
        return self._error

    def is_over(self) -> bool:
        """Return whether `wait` returns, or raises, at once."""
        return not self._running.locked()

    def wait(self) -> None:
        """See `Pending.wait`."""
        if self._running.locked():
            start = time.perf_counter()
            with self._running:
                pass
            self._waits.record(start)
        if self._error is not None:
            raise self._error


class ThreadLane:
    """A worker thread that performs transfers on the CPU.

    After a failed one, all later ones fail with its error: ranks would no longer be doing the same. Where that doesn't matter a
    lane is `forgiving`.

    `submit` waits while as many transfers as `most` are unfinished: what they hold (full gradients, above all) must not
    pile up where compute is faster than the link. Ranks can't lock each other out by that: all issue the same transfers in the
    same order, so the oldest one is under way everywhere.

    `link` is what it serves: who waits for the lane waits for that, or for what the transfers themselves wait for. An accelerator
    that is its `device` is its thread's current one, which else is number 0 on every rank, and has memory taken on it by CUDA.
    """

    def __init__(
        self,
        name: str,
        *,
        link: str | None = None,
        most: int = MOST_UNDER_WAY,
        forgiving: bool = False,
        device: torch.device = _CPU,
    ) -> None:
        self._waits = WorkerWaits(link)
        self._device = device
        self._forgiving = forgiving
        self._closed = False
        self.refused: BaseException | None = None
        """Why its thread could not begin with its device: the error of each transfer, none of which is performed."""
        self.log: Spans | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._most = most
        self._unfinished = 0
        self._lock = threading.RLock()  # entered directly: Ctrl-C may leave a condition, or a semaphore, locked
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon inside a transfer while the interpreter ends would abort the process

    def submit(
        self, transfer: Callable[[], None], *, after: Sequence[Pending] = (), ended: Callable[[], None] | None = None
    ) -> Job:
        """Queue `transfer`; the worker waits for what it comes after."""
        return self._queue(transfer, after, ended)

    def _queue(
        self,
        transfer: Callable[[], None],
        after: Sequence[Pending],
        ended: Callable[[], None] | None,
        put: Callable[[Job], None] | None = None,
    ) -> Job:
        if self._closed:
            raise RuntimeError(f"{self._thread.name} is closed: the process ends")
        job = Job(transfer if self.log is None else timed(transfer, self.log), after, self._waits, ended)
        with self._lock:
            if self._unfinished >= self._most:
                start = time.perf_counter()
                while self._unfinished >= self._most:
                    self._changed.wait()
                self._waits.record(start)
            self._unfinished += 1
            (put or self._jobs.put)(job)
        return job

    def _take(self) -> Job | None:
        """Return the next one, or None at the end."""
        return self._jobs.get()

    def close(self) -> None:
        """Perform the transfers that are queued, and end the thread."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            atexit.unregister(self.close)

    def _work(self) -> None:
        self._enter_device()
        failure = self.refused
        work_for(self._waits)
        with torch.inference_mode(False), torch.no_grad():
            while (job := self._take()) is not None:
                error = job.run(failure)
                failure = self.refused if self._forgiving else error
                del job  # with the buffers that its transfer held
                with self._lock:
                    self._unfinished -= 1
                    self._changed.notify_all()

    def _enter_device(self) -> None:
        try:
            if self._device.type != "cpu":
                torch.accelerator.set_device_index(self._device)
        except Exception as error:  # handed to whoever waits
            self.refused = error


class ArrivalLane(ThreadLane):
    """A worker thread for what is done to values behind their copies: in the order in which these arrive.

    In the order of submission what comes behind the last copy would keep all else waiting. What waits for more than copies may
    wait for others of this lane, and comes behind everything that was submitted before.
    """

    def __init__(self, name: str, *, most: int, device: torch.device = _CPU) -> None:
        self._queued: list[tuple[int, int, Job, Callable[[], bool] | None]] = []
        """By the numbers of copies and the order of submission; None for what waits for more."""
        self._serial = itertools.count()
        self._last = 0
        """The largest number of a copy so far."""
        self._behind_all = 0
        """How many wait for more than copies: somebody waits for these, perhaps."""
        self._submitted_at = 0.0
        super().__init__(name, most=most, forgiving=True, device=device)

    def submit_behind(self, copy: int, transfer: Callable[[], None], *, is_there: Callable[[], bool]) -> Job:
        """Queue what waits for a copy and for others of smaller numbers, in which order they arrive; `is_there`: they have."""
        return self._queue(transfer, (), None, partial(self._put, copy, is_there))

    def submit(
        self, transfer: Callable[[], None], *, after: Sequence[Pending] = (), ended: Callable[[], None] | None = None
    ) -> Job:
        """Queue `transfer` behind everything submitted before."""
        return self._queue(transfer, after, ended, partial(self._put, 0, None))

    def _put(self, copy: int, is_there: Callable[[], bool] | None, job: Job) -> None:
        self._last, self._submitted_at = max(self._last, copy), time.monotonic()
        self._behind_all += is_there is None
        heapq.heappush(self._queued, (copy or self._last, next(self._serial), job, is_there))
        self._jobs.put(job)

    def _take(self) -> Job | None:
        if self._jobs.get() is None:
            return None
        while True:
            with self._lock:
                *_, job, is_there = self._queued[0]
                waited = time.monotonic() - self._submitted_at >= PATIENCE_S
                if is_there is None or self._behind_all or waited or is_there():
                    heapq.heappop(self._queued)
                    self._behind_all -= is_there is None
                    return job
            time.sleep(POLL_S)


class InlineLane:
    """Performs each transfer at once; for a single rank, where nothing travels."""

    log: Spans | None = None

    def submit(
        self, transfer: Callable[[], None], *, after: Sequence[Pending] = (), ended: Callable[[], None] | None = None
    ) -> Pending:
        """Perform `transfer` now."""
        run = transfer if self.log is None else timed(transfer, self.log)
        try:
            for pending in after:
                pending.wait()
            run()
        finally:
            if ended is not None:
                ended()
        return Done()
