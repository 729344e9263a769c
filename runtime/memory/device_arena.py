"""An arena of a device's own memory for gathers and swaps: after the first steps nothing of theirs is allocated any more.

Note: Memory across streams
    A range is lent to the stream that is current then, and an event is recorded on that stream where the range comes back. Who is
    lent it next, on another stream, comes after that event; on the same stream it comes after anyway, so that none is recorded
    as long as there was one stream only. `record_stream` isn't needed: copies on other streams are over, as the lending stream
    knows it, before their memory comes back (`runtime/lanes/stream_lane.py`).
"""

from __future__ import annotations

import collections
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from zinf_compile._torch import tensor_on_storage
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import round_up
from zinf_compile.runtime.system.accelerator import accelerator_stream

from .own_storage import with_own_storage
from .ranges import FreeRanges

GRANULE = 512
"""Bytes to which ranges are rounded: what kernels may expect of the beginning of a tensor, as PyTorch's allocators give it."""

_BY_DLPACK = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types in which loans are made: the usual ones, which DLPack knows in every PyTorch. Others are views of bytes."""

_NO_END = 1 << 62

_Events = Mapping[torch.Stream, torch.Event | None]
"""By stream, the event after which nothing there uses a range any more; None: one that is recorded now is after all."""


def _join(one: _Events, other: _Events) -> _Events:
    """Return events after which neither of two neighbouring ranges is used."""
    if one is other:
        return one
    joined = {**one, **other}
    for stream in one.keys() & other.keys():
        joined[stream] = one[stream] if one[stream] is other[stream] else None
    return joined


def _wait(stream: torch.Stream, events: _Events) -> None:
    """Let a stream come after all that others did with a range."""
    for other, event in events.items():
        if other != stream:
            stream.wait_event(other.record_event() if event is None else event)


class _Lease:
    """A range that is lent, or memory of its own where the arena has none that is as large."""

    __slots__ = ("fresh", "length", "reference", "size", "start", "stream")

    def __init__(self, start: int, length: int, size: int, stream: torch.Stream, *, fresh: bool) -> None:
        self.start, self.length, self.size, self.stream, self.fresh = start, length, size, stream, fresh
        self.reference: weakref.ref[torch.Tensor] | None = None


class DeviceArena:
    """Lends memory of a device, which comes back by itself when the last tensor on it is dropped.

    Every loan has a place in an address space without end, the first that is large enough. The arena covers as much of that as
    was needed so far, once this no longer grows and where `limit` allows all of it; what lies beyond is memory of PyTorch's
    allocator, as long as it is lent. So the same loans in the same order, as in each step, are in the arena, and it has no more
    fragments than its first step had. It is allocated anew, larger or smaller, where nothing is lent.

    Where `limit` is less than was needed there is no arena. A part of one would lie idle beside the loans that it has no place
    for: both together may be far more than is lent.

    `account` is told of each change of the bytes that the arena has beside what is lent. Any thread may call, and drop tensors.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        account: Callable[[int], None] = lambda change: None,
        limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.account, self.limit = account, limit
        self._device = device
        self._lock = threading.Lock()  # not entered again: what is dropped meanwhile waits in `_returned`
        self._arena: torch.Tensor | None = None
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        """The arena as a tensor of each type that was lent."""
        self._stream: torch.Stream | None = None
        """The stream on which the arena was allocated, and will be freed."""
        self._size = 0
        self._ranges: FreeRanges[_Events] = FreeRanges(_NO_END, {}, _join)
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count()
        self._returned: collections.deque[tuple[_Lease, _Events]] = collections.deque()
        self._streams: set[torch.Stream] = set()
        """Those that something was lent to."""
        self._lent = 0
        """Loans that didn't come back, or are still in `_returned`."""
        self._needed = 0
        """The end of the last place that was ever lent."""
        self._needed_before = 0
        """The same when nothing was lent last."""
        self._refused = _NO_END
        """The least size that PyTorch's allocator had not in one piece."""
        self._let_go = False

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor, content undefined, for the current stream, whatever mode the caller is in."""
        (lent,) = self.lend_together([numel], dtype)
        return lent

    def lend_together(self, numels: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return several tensors as `lend` does, each of which comes back by itself."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.lend_together(numels, dtype)
        to_bytes = format_of(dtype).bytes
        made_as = dtype if dtype in _BY_DLPACK else torch.uint8
        with self._lock:
            self._let_go = False
            stream = accelerator_stream(self._device)
            self._streams.add(stream)
            taken = 0
            lent = []
            try:
                for numel in numels:
                    if size := to_bytes(numel):
                        tensor, of_arena = self._lend(numel if made_as is dtype else size, made_as, size, stream)
                        taken += of_arena
                        lent.append(tensor if made_as is dtype else tensor.view(dtype))
                    else:
                        lent.append(torch.empty(numel, dtype=dtype, device=self._device))
            finally:
                if taken:
                    self.account(-taken)
        return lent

    def held_bytes(self) -> int:
        """Return the bytes of the arena and of what is lent beside it."""
        with self._lock:
            self._take_back()
            return self._size + sum(lease.size for lease in list(self._leases.values()) if lease.fresh)

    def trim(self) -> None:
        """Give the arena back to PyTorch's allocator if it is larger than is allowed by now, where nothing is lent."""
        with self._lock:
            self._take_back()
            if not self._lent and self._allowed() < self._size:
                self._resize(0)

    def clear(self) -> None:
        """Give the arena back to PyTorch's allocator, now or when the last loan comes back, and forget how much was needed."""
        self._let_go = True
        self._settle()

    def _lend(self, numel: int, dtype: torch.dtype, size: int, stream: torch.Stream) -> tuple[torch.Tensor, int]:
        """Return a loan to a stream, and its bytes that are the arena's."""
        length = round_up(size, GRANULE)
        self._take_back()
        if not self._lent:
            self._fit(length)
        found = self._ranges.take(length)
        assert found is not None, "it has no end"
        start, events = found
        self._needed = max(self._needed, start + length)
        fresh = start + length > self._size
        if fresh:
            leased = torch.empty(numel, dtype=dtype, device=self._device)
        else:
            _wait(stream, events)
            leased = tensor_on_storage(self._arena_as(dtype), (numel,), (1,), format_of(dtype).numel_within(start))
        lease = _Lease(start, length, size, stream, fresh=fresh)
        number = next(self._numbers)
        self._leases[number] = lease
        self._lent += 1
        lent = with_own_storage(leased)
        lease.reference = weakref.ref(leased, lambda _: self._come_back(number))  # which `lent` holds
        return lent, 0 if fresh else size

    def _arena_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the arena as a tensor of a type."""
        found = self._typed.get(dtype)
        if found is None:
            assert self._arena is not None, "it has a size"
            found = self._typed[dtype] = self._arena.view(dtype)
        return found

    def _come_back(self, number: int) -> None:
        """Note, on any thread and inside of anything, that a loan is no longer used."""
        lease = self._leases.pop(number)
        if sys.is_finalizing():
            return
        events: _Events = {}
        if not lease.fresh:
            events = {lease.stream: lease.stream.record_event() if len(self._streams) > 1 else None}
            self.account(lease.size)
        self._returned.append((lease, events))
        if self._let_go:
            self._settle()

    def _take_back(self) -> None:
        while self._returned:
            lease, events = self._returned.popleft()
            self._ranges.give(lease.start, lease.length, events)
            self._lent -= 1

    def _settle(self) -> None:
        """Give the arena back if nothing is lent; where that is asked for while somebody is at it, that one looks again."""
        while self._lock.acquire(blocking=False):
            try:
                self._take_back()
                if not self._lent and self._let_go:
                    self._needed, self._needed_before, self._refused = 0, 0, _NO_END
                    self._resize(0)
            finally:
                self._lock.release()
            if not self._returned:
                return

    def _fit(self, length: int) -> None:
        """Make the arena as large as is needed, and allowed, before a range is lent; nothing else is."""
        allowed = self._allowed(beside=length)
        grows = self._size < allowed < self._refused and self._needed == self._needed_before
        if grows or allowed < self._size:
            self._resize(allowed)
        self._needed_before = self._needed

    def _allowed(self, *, beside: int = 0) -> int:
        """Return how large the arena may be, where it has no place for a loan of `beside` bytes beside that as well."""
        limit = self.limit()
        held = self._needed + (beside if beside > self._needed else 0)
        return self._needed if limit is None or held <= limit else 0

    def _resize(self, size: int) -> None:
        if self._arena is not None:
            assert self._stream is not None, "it was allocated"
            for used in self._ranges.marks():
                _wait(self._stream, used)
            self._arena = None
            self._typed.clear()
            self.account(-self._size)
            self._size = 0
        events: dict[torch.Stream, torch.Event | None] = {}
        if size:
            try:
                self._arena = torch.empty(size, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:  # not in one piece: what is lent is memory of its own
                self._refused = size
            else:
                self._size = size
                self._stream = accelerator_stream(self._device)
                self.account(size)
                events = {self._stream: self._stream.record_event()}
        self._ranges = FreeRanges(_NO_END, events, _join)
