"""What tests set and read."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .library import CALL, PATH, C, parsed  # noqa: F401


class Defect(NamedTuple):
    kind: str
    """ "unordered accesses", "waits for unrecorded events" or "sources changed before their copy"."""
    detail: str
    """Operators and streams."""


class Logged(NamedTuple):
    name: str
    start: float
    """Seconds of `time.monotonic()`, after the delay; inside `durations`, of the model of time."""
    end: float
    bytes: int
    late_by: float
    """Seconds that it was held back before it started."""


@dataclass(frozen=True)
class Account:
    """Bytes of device memory as asked for, without rounding, and calls of the allocator."""

    now: int
    peak: int
    reserved: int
    allocations: int
    frees: int


class InUse(NamedTuple):
    device_bytes: int
    """As asked for, without rounding."""
    pinned_bytes: int
    """Of host memory, registered memory among them."""
    events: int
    """That were recorded and still exist."""
    streams: int


@contextmanager
def delays(longest: float, *, seed: int = 0, chance: float = 1.0, exponential: bool = False) -> Iterator[None]:
    """Let each work of a stream be late by up to `longest` seconds, with probability `chance`.

    The same seed gives the same delays.
    """
    C.late_set_delays(seed, longest, chance, exponential)
    try:
        yield
    finally:
        C.late_set_delays(0, 0.0, 1.0, False)


@contextmanager
def durations(seconds: Mapping[str, float], otherwise: float = 0.0) -> Iterator[None]:
    """Let a model of time run beside the real one, and logs say its times: each work takes what is said for its name.

    A work begins once its stream, what that waits for, and the host thread that issues it have come there. A thread of the host
    takes no time but where it waits. So logs depend on the order of calls alone, and on no other process; so does what a query
    of an event returns. Drives take no time.
    """
    names = (ctypes.c_char_p * len(seconds))(*(name.encode() for name in seconds))
    C.late_set_durations(len(seconds), names, (ctypes.c_double * len(seconds))(*seconds.values()), otherwise)
    try:
        yield
    finally:
        C.late_set_durations(0, None, None, 0.0)


@contextmanager
def lazily() -> Iterator[None]:
    """Let streams run only while the host waits for one, or after it asked whether something is done.

    They are never earlier than they have to be.
    """
    C.late_set_lazy(True)
    try:
        yield
    finally:
        C.late_set_lazy(False)


@contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """Let a stream stand still: what is issued inside runs on it after the end of this block.

    Waiting for it inside never ends.
    """
    hold = C.late_hold((stream or torch.accelerator.current_stream()).stream_id)
    try:
        yield
    finally:
        C.late_release(hold)


@contextmanager
def waits_forbidden() -> Iterator[None]:
    """Raise where the host waits for the device: the traceback says who."""
    C.late_forbid_waits(True)
    try:
        yield
    finally:
        C.late_forbid_waits(False)


@contextmanager
def detection(on: bool) -> Iterator[None]:
    """Look for unordered accesses, or don't."""
    C.late_set_detection(on)
    try:
        yield
    finally:
        C.late_set_detection(True)


@contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """Have no more than `limit` bytes of device memory."""
    C.late_set_capacity(limit)
    try:
        yield
    finally:
        C.late_set_capacity(16 << 30)


@contextmanager
def pinned_limit(limit: int) -> Iterator[None]:
    """Pin no more than `limit` bytes of host memory, registered memory among them."""
    C.late_set_pinned_limit(limit)
    try:
        yield
    finally:
        C.late_set_pinned_limit(2**64 - 1)


def counters() -> Counter[str]:
    """Return how often something happened since `clear`.

    Host waits: "host waits" in all, and by reason "synchronized device", "synchronized streams", "synchronized events",
    "blocking copies", "operators that the host waits for"; the last two also by operator, as "blocking copies: copy to host".
    "copies of unpinned memory" are blocking copies that were asked not to block. Defects: "unordered accesses", "waits for
    unrecorded events", "sources changed before their copy". "record_stream", and "memory kept by autograd" where PyTorch's
    engine does the same; "failures on streams".
    """
    return Counter(parsed(C.late_report())["counters"])


def waits_by_thread() -> Counter[str]:
    """Return how often each thread of the host has waited, by its name; "" is what Python doesn't know, or knows no more."""
    names = {f"host waits: thread {thread.native_id}": thread.name for thread in threading.enumerate()}
    found: Counter[str] = Counter()
    for name, count in counters().items():
        if name.startswith("host waits: thread"):
            found[names.get(name, "")] += count
    return found


def defects() -> list[Defect]:
    return [Defect(*defect) for defect in parsed(C.late_report())["defects"]]


def account() -> Account:
    return Account(**parsed(C.late_report())["account"])


def in_use() -> InUse:
    """Return what exists of the device at this moment. Streams are given out again after the first 256."""
    return InUse(account().now, C.late_pinned_bytes(), C.late_events(), C.late_streams())


def reset_peak() -> None:
    C.late_reset_peak()


def fault_output(file: int) -> None:
    """Write what a touch of device memory by the host ends with to this file; standard error before.

    To be called again after `faulthandler.enable`, which takes the signal first and hides the address from those before it.
    """
    C.late_set_fault_output(file)


def clear() -> None:
    """Forget counters, defects and logs."""
    C.late_clear()


def drive_begins(name: str, address: int, length: int, *, writes: bool) -> int:
    """Tell the detector of a transfer between a drive and pinned memory, which it writes or reads; return its number.

    It is unordered with what streams do there unless the host has waited for that, and they come after it once the host has
    waited for it, which `drive_ended` tells.
    """
    return int(C.late_drive_begins(name.encode(), address, length, writes))


def drive_ended(number: int) -> None:
    C.late_drive_ended(number)


def log(stream: torch.Stream | int | None = None) -> list[Logged]:
    """Return what a stream has run since `clear`, in its order."""
    if not isinstance(stream, int):
        stream = (stream or torch.accelerator.current_stream()).stream_id
    return [Logged(*work) for work in parsed(C.late_log(stream))]


def logs() -> dict[int, list[Logged]]:
    """Return the logs of all streams that have run anything since `clear`, by their numbers."""
    return {stream: found for stream in range(C.late_streams()) if (found := log(stream))}


def overlap(some: Sequence[Logged], others: Sequence[Logged]) -> float:
    """Return for how many seconds work of both logs ran at the same time."""
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in some for b in others)


_calls: dict[int, Callable[[], object]] = {}
_numbers = itertools.count()


@CALL
def _call(number: int) -> None:
    try:
        _calls.pop(number)()
    except BaseException as error:
        C.late_fail(f"{type(error).__name__}: {error}".encode())


def run_on_stream(
    call: Callable[[], object],
    name: str = "call",
    *,
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
) -> None:
    """Issue `call` to the current stream: it runs on the stream's thread.

    There `torch.ops.late.host_view` gives a tensor of the device as one that the CPU's kernels can take.
    The tensors are for the detector of unordered accesses.
    """
    number = next(_numbers)
    _calls[number] = call
    touched = [(t.data_ptr(), t.nbytes, written) for tensors, written in ((reads, 0), (writes, 1)) for t in tensors]
    flat = [value for each in touched for value in each]
    array = (ctypes.c_uint64 * len(flat))(*flat)
    C.late_call(torch.accelerator.current_stream().stream_id, name.encode(), _call, number, array, len(touched))
