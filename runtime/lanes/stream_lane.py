"""A lane of an accelerator: transfers are issued to a stream, and whoever needs them waits for an event."""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from zinf_compile.runtime.system.accelerator import accelerator_stream

from .lanes import MOST_UNDER_WAY, All, Done, Job, Pending, ThreadLane
from .overlap_log import Spans
from .wait_times import WorkerWaits


class StreamTransfer:
    """A transfer on a stream. `wait` orders the caller's stream after it; the host waits at most until it is issued.

    It holds what its closure works on until the stream from which it was submitted is ordered after it, or after a transfer that
    comes after it, or it is known to be over: memory of that is freed in the order of that stream, so another lane's wait lets
    nothing go. Host memory it holds until it is over.
    """

    def __init__(
        self, device: torch.device, transfer: Callable[[], None], host_memory: Sequence[torch.Tensor], waits: WorkerWaits
    ) -> None:
        self._device = device
        self._transfer: Callable[[], None] | None = transfer
        self._host_memory = host_memory
        self._waits = waits
        self.owner = accelerator_stream(device)
        """The stream that submitted it."""
        self._before: Sequence[StreamTransfer] = ()
        """Those that it comes after."""
        self._event: torch.Event | None = None
        self._error: BaseException | None = None
        self._is_over = False
        self._issued = threading.Lock()  # no event: Ctrl-C in a wait for one may leave it locked
        self._issued.acquire()

    def issue(self, stream: torch.Stream, compute: torch.Event, after: Sequence[Pending]) -> None:
        """Issue it to a stream, after an event and other transfers; on any thread."""
        try:
            assert self._transfer is not None
            with torch.inference_mode(False), torch.no_grad(), stream:
                stream.wait_event(compute)
                for pending in after:
                    pending.wait()
                self._transfer()
                self._before = [job for pending in after for job in _stream_transfers(pending)]
                self._event = stream.record_event()
        finally:
            self._issued.release()

    def fail(self, error: BaseException) -> None:
        """Note why it was not issued."""
        self._error, self._transfer, self._host_memory, self._before = error, None, (), ()
        if self._issued.locked():
            self._issued.release()

    def raise_interrupt(self) -> None:
        """Raise what ended issuing it, where that was no error: Ctrl-C is this thread's, not that of whoever waits."""
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error

    def is_issued(self) -> bool:
        """Return whether `wait` returns at once."""
        return not self._issued.locked()

    def is_over(self) -> bool:
        """Return whether the device is done with it, or it failed; host memory is given up then."""
        over = self._error is not None or (self._event is not None and self._event.query())
        if over:
            self._transfer, self._host_memory, self._before = None, (), ()
        return over

    def wait(self) -> None:
        """Let what this thread issues next, on its current stream, come after the transfer; raise why it was not issued."""
        self._wait_issued()
        assert self._event is not None
        stream = accelerator_stream(self._device)
        stream.wait_event(self._event)
        if stream == self.owner:
            self._let_memory_go()

    def _let_memory_go(self) -> None:
        """The stream that submitted it is ordered after it, and so after those that it comes after."""
        before, self._transfer, self._before = self._before, None, ()
        for job in before:
            if job.owner == self.owner:
                job._let_memory_go()

    def reads(self, starts: Sequence[int], ends: Sequence[int]) -> bool:
        """Return whether it holds host memory that overlaps with one of these ranges of addresses, which are in order."""
        for held in self._host_memory:
            start = held.data_ptr()
            first = bisect.bisect_right(ends, start)  # the first range that ends behind it
            if first < len(starts) and starts[first] < start + held.nbytes:
                return True
        return False

    def let_go(self) -> None:
        """Have it hold nothing any more: another stream is ordered after it, and the host waits where it holds host memory."""
        if self._host_memory:
            self.synchronize()
        else:
            self.wait()

    def synchronize(self) -> None:
        """Return when the device is done with it; raise why it was not issued."""
        if self._is_over:
            return
        self._wait_issued()
        assert self._event is not None
        if not self._event.query():
            start = time.perf_counter()
            self._event.synchronize()
            self._waits.record(start)
        self._transfer, self._host_memory, self._before, self._is_over = None, (), (), True

    def _wait_issued(self) -> None:
        if self._issued.locked():
            start = time.perf_counter()
            with self._issued:
                pass
            self._waits.record(start)
        if self._error is not None:
            raise self._error


class TransferToHost:
    """A transfer on a stream whose result is read by the host, which waits for it; another lane's stream is ordered after it."""

    def __init__(self, transfer: StreamTransfer) -> None:
        self.transfer = transfer

    def wait(self) -> None:
        """Return when the result is in host memory; raise why it was not issued."""
        self.transfer.synchronize()


class StreamLane:
    """A stream of an accelerator. A transfer begins after the compute that was issued before `submit`.

    Buffers are allocated and freed on the compute stream; the lane's stream waits for it before it writes, and compute waits for
    the transfer's event before it reads, so that no memory is handed out anew under a transfer, without `record_stream`.

    The host issues it at once, unless it comes after something that only the host can wait for, as a drive, or after a transfer
    that isn't issued yet: then a thread issues it, and those submitted meanwhile queue behind it. After one that was not issued
    all later ones fail with its error, as on a `ThreadLane`, unless the lane is `forgiving`. Any thread may call.
    """

    log: Spans | None = None
    """Times on a stream are the device's: the host keeps no log of them."""

    def __init__(
        self, device: torch.device, name: str, *, link: str | None = None, most: int = MOST_UNDER_WAY, forgiving: bool = False
    ) -> None:
        self._device, self._name, self._most, self._forgiving = device, name, most, forgiving
        self._lock = threading.RLock()  # a tensor that is dropped may call from inside
        self._stream = torch.Stream(device)
        self._waits = WorkerWaits(link)
        self._under_way: collections.deque[StreamTransfer] = collections.deque()
        """Those that compute may not be ordered after yet, and those that hold host memory."""
        self._issuer: ThreadLane | None = None
        self._failure: BaseException | None = None

    def submit(
        self,
        transfer: Callable[[], None],
        *,
        after: Sequence[Pending] = (),
        ended: Callable[[], None] | None = None,
        host_memory: Sequence[torch.Tensor] = (),
    ) -> StreamTransfer:
        """Issue `transfer`, or have it issued; `ended` is called when it is. `host_memory` is held until it is over.

        Where that comes from a drive, or where the device's memory is held, no more than `most` are under way.
        """
        with self._lock:
            return self._submit(transfer, after, ended, host_memory)

    def _submit(
        self,
        transfer: Callable[[], None],
        after: Sequence[Pending],
        ended: Callable[[], None] | None,
        host_memory: Sequence[torch.Tensor],
    ) -> StreamTransfer:
        self.settle()
        never_blocks = all(map(_never_blocks, after))
        while len(self._under_way) >= self._most and not (host_memory and never_blocks):
            self._under_way.popleft().let_go()
        at_once = never_blocks and (not self._under_way or self._under_way[-1].is_issued())  # they are issued in order
        job = StreamTransfer(self._device, transfer, host_memory, self._waits)
        compute = job.owner.record_event()
        self._under_way.append(job)

        def issue() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                job.issue(self._stream, compute, [on_stream(pending) for pending in after])
            except BaseException as error:
                job.fail(error)
                if not self._forgiving:
                    self._failure = error
            finally:
                if ended is not None:
                    ended()

        if not at_once:
            issuer = self._issuer or ThreadLane(self._name, most=self._most + 1, forgiving=True, device=self._device)
            self._issuer = issuer

            def leave_out() -> None:
                if issuer.refused is not None:
                    job.fail(issuer.refused)
                    if ended is not None:
                        ended()

            issuer.submit(issue, ended=leave_out)
            return job
        issue()
        job.raise_interrupt()
        return job

    def settle(self) -> None:
        """Let go of transfers that are over."""
        with self._lock:
            while self._under_way and self._under_way[0].is_over():
                self._under_way.popleft()

    def free_host_memory(self, enough: Callable[[], bool]) -> None:
        """Wait for transfers, the oldest first, until what they let go leaves `enough`, or none is under way."""
        self.settle()
        while not enough():
            with self._lock:
                oldest = self._under_way[0] if self._under_way else None
            if oldest is None:
                return
            with contextlib.suppress(Exception):  # who needs it is told
                oldest.synchronize()
            self.settle()

    def readers(self, memory: Sequence[torch.Tensor]) -> list[StreamTransfer]:
        """Return the transfers under way that hold host memory which overlaps with some of this."""
        with self._lock:
            self.settle()
            if not self._under_way:
                return []
            ranges = sorted((start, start + each.nbytes) for each in memory if (start := each.data_ptr()))
            starts = [start for start, _ in ranges]
            ends = list(itertools.accumulate((end for _, end in ranges), max))
            return [job for job in self._under_way if job.reads(starts, ends)]

    def close(self) -> None:
        """Issue what is queued, end the thread, and wait for the device."""
        if self._issuer is not None:
            self._issuer.close()
            self._issuer = None
        if self._under_way:
            self._stream.synchronize()
            self._under_way.clear()


def on_stream(pending: Pending) -> Pending:
    """Return the transfer whose `wait` orders the caller's stream after it, where that of `pending` would keep the host."""
    if isinstance(pending, All):
        return All([on_stream(part) for part in pending.parts])
    return pending.transfer if isinstance(pending, TransferToHost) else pending


def _stream_transfers(pending: Pending) -> list[StreamTransfer]:
    """Return the transfers on streams that are waited for where this is."""
    pending = on_stream(_innermost(pending))
    if isinstance(pending, All):
        return [job for part in pending.parts for job in _stream_transfers(part)]
    return [pending] if isinstance(pending, StreamTransfer) else []


def _innermost(pending: Pending) -> Pending:
    while (inner := getattr(pending, "awaited", None)) is not None:
        pending = inner
    return pending


def _never_blocks(pending: Pending) -> bool:
    """Say whether a stream can be ordered after a transfer at once."""
    pending = _innermost(pending)
    if isinstance(pending, All):
        return all(map(_never_blocks, pending.parts))
    if isinstance(pending, Job):
        return pending.is_over()
    pending = on_stream(pending)
    return isinstance(pending, Done) or (isinstance(pending, StreamTransfer) and pending.is_issued())
