"""Time-outs of drives: a warning after some seconds without any progress of an engine, an error after its time-out."""

from __future__ import annotations

import errno
import threading
import time
import warnings
from typing import Protocol

from zinf_compile import _csrc
from zinf_compile.errors import StoreWarning

PATIENCE_S = 10.0
"""Seconds without progress until a warning."""
TIMEOUT_S = 600.0
"""Seconds without progress until an error, by default."""
EXIT_S = 3.0
"""The same while the process ends: less than the wait for a lane's worker."""
_LOOK_S = 0.25


class _Pending(Protocol):
    def done(self) -> bool: ...

    def wait(self, seconds: float) -> bool: ...


class StallWatch:
    """Waits for the transfers of one engine, as long as any of them makes progress. Any thread may call.

    A transfer that was given up is still under way: its memory is not free. Until it is over the engine takes no others.
    """

    def __init__(self, native: _csrc.Engine, timeout_s: float) -> None:
        self._native = native
        self.timeout_s = timeout_s
        self._given_up: list[tuple[_Pending, str, str]] = []
        self._warned_of = -1
        """The progress at which a warning was given: one for each standstill."""

    def wait(self, pending: _Pending, what: str, path: str) -> None:
        """Return when a transfer is over; raise `OSError` (ETIMEDOUT) naming it where its drive gives no answer."""
        if pending.wait(_look_s()):
            return
        seen, since = self._progress(), time.monotonic()
        while not pending.wait(_look_s()):
            if (progress := self._progress()) != seen:
                seen, since = progress, time.monotonic()
                continue
            idle = time.monotonic() - since
            if idle >= (min(self.timeout_s, EXIT_S) if _exiting() else self.timeout_s) or self._stuck():
                self._given_up.append((pending, what, path))
                raise self._error(what, path)
            if idle >= PATIENCE_S and self._warned_of != seen:
                self._warned_of = seen
                warnings.warn(
                    f"{path}: its drive has not answered for {idle:.0f} s; waiting for a {what}, until {self.timeout_s:g} s are "
                    "over (option timeout_s). See `dmesg` and whether a network mount is gone",
                    StoreWarning,
                    stacklevel=2,
                )

    def admit(self) -> None:
        """Raise `OSError` (ETIMEDOUT) while a transfer that was given up is under way."""
        if stuck := self._stuck():
            raise self._error(*stuck)

    def drained(self) -> bool:
        """Wait until nothing is under way; return False where the drives give no answer."""
        pause, seen, since = 0.0005, self._progress(), time.monotonic()
        while self._native.counters().in_flight:
            if (progress := self._progress()) != seen:
                seen, since = progress, time.monotonic()
            elif self._stuck() or time.monotonic() - since >= (min(self.timeout_s, EXIT_S) if _exiting() else self.timeout_s):
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return True

    def error(self) -> OSError:
        """Return what to raise where nothing but some transfer is known to be stuck."""
        return self._error(*(self._stuck() or ("transfer", "a file of the engine")))

    def _stuck(self) -> tuple[str, str] | None:
        self._given_up = [given_up for given_up in self._given_up if not given_up[0].done()]
        return self._given_up[0][1:] if self._given_up else None

    def _error(self, what: str, path: str) -> OSError:
        return OSError(
            errno.ETIMEDOUT,
            f"{what}: the drive has not answered for {self.timeout_s:g} s (option timeout_s). Once it does, load a checkpoint or "
            "start again",
            path,
        )

    def _progress(self) -> int:
        counters = self._native.counters()
        return counters.bytes_read + counters.bytes_written + counters.requests - counters.in_flight


def _exiting() -> bool:
    """Say whether the interpreter has begun to end: then its main thread is over, though it still runs what ends it."""
    return not threading.main_thread().is_alive()


def _look_s() -> float:
    return min(_LOOK_S, PATIENCE_S / 4)
