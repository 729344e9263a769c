"""A drive that doesn't answer: transfers that are never over until somebody lets them be."""

from __future__ import annotations

import threading
import types
from typing import Any

from zinf_compile.runtime.storage.engine import Engine


class StuckPending:
    """A transfer that the drive says nothing of."""

    def __init__(self, really: Any, answered: threading.Event) -> None:
        self._really, self._answered, self.number = really, answered, really.number

    def done(self) -> bool:
        return self._answered.is_set() and bool(self._really.done())

    def wait(self, seconds: float) -> bool:
        return self._answered.wait(seconds) and bool(self._really.wait(seconds))

    def outcome(self) -> Any:
        return self._really.outcome()


class StuckNative:
    """The native engine with such a drive beneath it; `count` transfers begin well."""

    def __init__(self, engine: Engine, count: int = 0) -> None:
        self._really, self._left = engine._native, count
        self.answered = threading.Event()
        self._stuck: list[StuckPending] = []
        self.progress = 0
        engine._native = self  # type: ignore[assignment]
        engine._watch._native = self  # type: ignore[assignment]

    def submit(self, **transfer: Any) -> Any:
        pending = self._really.submit(**transfer)
        if self._left > 0 or self.answered.is_set():
            self._left -= 1
            return pending
        self._stuck.append(StuckPending(pending, self.answered))
        return self._stuck[-1]

    def counters(self) -> Any:
        found = self._really.counters()
        stuck = sum(not pending.done() for pending in self._stuck)
        return types.SimpleNamespace(
            requests=found.requests, in_flight=found.in_flight + stuck, bytes_read=self.progress, bytes_written=0
        )

    def take_finished(self) -> list[int]:
        return self._really.take_finished() if self.answered.is_set() else []

    def close(self) -> None:
        self.answered.wait()
        self._really.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._really, name)
