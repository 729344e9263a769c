"""Asynchronous file I/O: an engine that reads and writes memory in place, by io_uring or by threads.

    with Engine() as engine, File("/mnt/nvme0/states", write=True) as file:
        written = engine.write(file, 0, tensor, checksum=True)
        ...                                                     # compute
        checksum = written.wait()

The result of every transfer is read: short ones are resumed, and whatever fails raises `OSError` where it is waited for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from types import TracebackType

import torch

from zinf_compile import _csrc

from .direct_file import File
from .stalls import TIMEOUT_S, StallWatch

__all__ = ["Engine", "File", "Request", "crc32c", "crc32c_combine"]

_log = logging.getLogger("zinf_compile")

Memory = torch.Tensor | memoryview | bytearray | bytes
"""Memory to transfer: a contiguous CPU tensor, or anything with a contiguous buffer."""


class Request:
    """A transfer under way; made by `Engine.read` and `Engine.write`. Dropping it neither cancels nor endangers the transfer."""

    def __init__(self, pending: _csrc.Pending, held: _Held, watch: StallWatch, what: str, path: str, checksum: bool) -> None:
        self._pending = pending
        self._held = held
        self._watch = watch
        self._what = what
        self._path = path
        self._checksum = checksum
        self.times: tuple[float, float] | None = None
        """When its bytes went to the drive and were there, by `time.perf_counter`, after `wait`."""

    def wait(self) -> int | None:
        """Wait until the transfer is over; return the CRC32C of its bytes, or None if that was not asked for.

        The GIL is released. Any thread may wait, and wait again for the same result. Raises `OSError` with errno, path and a
        message with offset, wanted and got bytes; its errno is EIO where the file ended early, and ETIMEDOUT where the drive gave
        no answer: then the transfer is still under way, and its memory must not be used. Raises `RuntimeError` in a forked child.
        """
        self._watch.wait(self._pending, self._what, self._path)
        self._held.release(self._pending.number)
        outcome = self._pending.outcome()
        self.times = outcome.began, outcome.over
        if outcome.error:
            why = "the file ended" if outcome.ended else os.strerror(outcome.error)
            message = f"{self._what} got {outcome.moved}: {why} at offset {outcome.failed_at}"
            raise OSError(outcome.error, message, self._path)
        return outcome.checksum if self._checksum else None

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._pending.done()


class _Held:
    """Memory and descriptors of transfers under way, by the transfers' numbers."""

    def __init__(self) -> None:
        self._by_number: dict[int, object] = {}

    def hold(self, number: int, held: object) -> None:
        self._by_number[number] = held

    def release(self, number: int) -> None:
        self._by_number.pop(number, None)


class Engine:
    """Moves bytes between files and memory, many transfers at a time, without the GIL.

    `engine` is "io_uring", "threads", or "auto": io_uring where this process may use it, and threads otherwise, which a line
    on the logger `zinf_compile` explains. io_uring asked for by name raises `OSError` where it is refused. Transfers are cut
    into pieces of `chunk_bytes` (a multiple of 4096), of which up to `depth` are under way at a time (with threads: 16 at
    most). `bandwidth` caps reads and writes together, in bytes per second. Where io_uring refuses to go on, threads do.

    Where nothing moves for some seconds, who waits is told by a `StoreWarning` what doesn't answer; after `timeout_s` that is an
    error, and the engine takes no transfers until what was given up is over.

    Transfers start in the order they are submitted and end in any. Those in flight at the same time must not overlap. Any
    thread may call anything; a forked child gets `RuntimeError`. Memory and file may be dropped or closed meanwhile, but a
    tensor's storage must not be resized. What is in flight when the engine is dropped or the interpreter ends is finished, where
    the drives answer.
    """

    def __init__(
        self,
        engine: str = "auto",
        *,
        depth: int = 32,
        chunk_bytes: int = 1 << 20,
        bandwidth: float | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if not 1 <= depth <= 4096:
            raise ValueError(f"depth is the number of pieces under way, 1 to 4096, not {depth}")
        if chunk_bytes < 4096 or chunk_bytes % 4096:
            raise ValueError(f"chunk_bytes is a positive multiple of 4096, not {chunk_bytes}")
        if bandwidth is not None and not 0 < bandwidth < float("inf"):
            raise ValueError(f"bandwidth is a positive number of bytes per second, or None, not {bandwidth}")
        self._native = _csrc.Engine(engine, depth, chunk_bytes, bandwidth or 0.0)
        self.name: str = self._native.name
        """The engine chosen: "io_uring" or "threads"; threads too once io_uring has failed."""
        self.reason: str = self._native.reason
        """Why io_uring was refused, or failed later; empty if it was not, or not asked for."""
        if self.reason:
            _log.info("I/O runs on threads, not on io_uring: %s", self.reason)
        self._held = _Held()
        self._watch = StallWatch(self._native, timeout_s)
        self._submitting = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self._native, self._held, self._watch)

    def read(self, file: File, offset: int, into: Memory, *, checksum: bool = False) -> Request:
        """Start to read `into` from the bytes of `file` at `offset`; all of them, or the request fails.

        Raises `ValueError` for a negative offset, memory that is not contiguous, or a closed engine or file, `TypeError` for
        memory that can't be written to or is not on the CPU.
        """
        return self._submit(file, offset, into, write=False, checksum=checksum)

    def write(self, file: File, offset: int, source: Memory, *, checksum: bool = False) -> Request:
        """Start to write `source` to `file` at `offset`; all of it, or the request fails.

        The memory must not change until the request is over. Raises as `read` does, and `OSError` for a file opened for
        reading only.
        """
        return self._submit(file, offset, source, write=True, checksum=checksum)

    @property
    def timeout_s(self) -> float:
        """Seconds without any progress after which who waits gets an error."""
        return self._watch.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._watch.timeout_s = seconds

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._native.counters().bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written so far."""
        return self._native.counters().bytes_written

    @property
    def requests(self) -> int:
        """Requests submitted so far."""
        return self._native.counters().requests

    @property
    def in_flight(self) -> int:
        """Requests submitted that are not over."""
        return self._native.counters().in_flight

    def close(self) -> None:
        """Wait for what is in flight and end the engine's threads. Closing again does nothing.

        Raises `OSError` (ETIMEDOUT) where the drives give no answer; the engine is left as it is then.
        """
        if not self._native.forked and not self._watch.drained():
            raise self._watch.error()
        self._native.close()
        self._finalizer()

    def __enter__(self) -> Engine:
        """Return the engine itself, to be closed at the end of the `with` block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the engine."""
        self.close()

    def __repr__(self) -> str:
        """Show which engine it is."""
        return f"<Engine {self.name}>"

    def _submit(self, file: File, offset: int, memory: Memory, *, write: bool, checksum: bool) -> Request:
        if offset < 0:
            raise ValueError(f"offset is negative: {offset}, in {file.path!r}")
        address, size, owner = _locate(memory, writable=not write)
        if offset + size >= 1 << 63:
            raise ValueError(f"offset {offset} is beyond the largest file, for {file.path!r}")
        descriptor, alignment = file.choose(offset, address, size, write=write)
        for number in self._native.take_finished():
            self._held.release(number)
        self._watch.admit()
        if self.name == "io_uring" and (error := self._native.broken):
            self.name, self.reason = "threads", f"io_uring_enter: {os.strerror(error)}"
            _log.warning("I/O goes on on threads, since io_uring failed: %s", self.reason)
        with self._submitting:
            # Held first, under the number to come, so that no interrupt can come between submitting and holding.
            number = self._native.counters().requests
            self._held.hold(number, (owner, descriptor))
            try:
                pending = self._native.submit(
                    write=write,
                    fd=descriptor.fd,
                    offset=offset,
                    address=address,
                    bytes=size,
                    alignment=alignment,
                    checksum=checksum,
                )
            except ValueError:  # closed
                self._held.release(number)
                raise
            assert pending.number == number, "transfers are numbered in the order they are submitted"
        what = f"{'write' if write else 'read'} of {size} bytes at offset {offset}"
        return Request(pending, self._held, self._watch, what, file.path, checksum)


def _close(native: _csrc.Engine, held: _Held, watch: StallWatch) -> None:
    """End an engine nobody refers to any more. `held` comes along so that it lives until then."""
    if native.forked:
        return
    if watch.drained():
        native.close()
        return
    _log.error("the process goes on without %s", watch.error())
    for kept in (native, held):  # for ever: ending the engine would wait for what is under way, and that writes to memory
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _locate(memory: Memory, *, writable: bool) -> tuple[int, int, object]:
    """Return address, size in bytes, and what to hold so that both stay as they are."""
    if isinstance(memory, torch.Tensor):
        if memory.device.type != "cpu":
            raise TypeError(f"only memory of the CPU can be transferred, not a tensor on {memory.device}")
        if not memory.is_contiguous():
            raise ValueError(f"only contiguous tensors can be transferred, not one of strides {tuple(memory.stride())}")
        return memory.data_ptr(), memory.nbytes, memory.detach()
    view = memoryview(memory)
    if not view.c_contiguous:
        raise ValueError("only contiguous memory can be transferred")
    if writable and view.readonly:
        raise TypeError("cannot read into memory that can't be written to")
    if view.nbytes == 0:
        return 0, 0, view
    view = view.cast("B")
    return _csrc.address_of(view, writable), view.nbytes, view


def crc32c(data: Memory, value: int = 0) -> int:
    """Return the CRC32C (Castagnoli) of what `value` is the CRC32C of, followed by `data`."""
    address, size, _ = _locate(data, writable=False)
    return _csrc.crc32c_at(address, size, value)


def crc32c_combine(a: int, b: int, len_b: int) -> int:
    """Return the CRC32C of two runs of bytes put together, from the CRC32C of each and the second one's length in bytes."""
    return _csrc.crc32c_combine(a, b, len_b)
