"""What the graphs and optimizers of some ranks may hold at once, and what each of them has claimed of it."""

from __future__ import annotations

import dataclasses
import threading


@dataclasses.dataclass
class Claims:
    """On one rank, in bytes. What a claim covers is never exceeded while the schedule runs."""

    device_cap: int | None = None
    host_cap: int | None = None
    passing: int = 0
    """The most that one graph gathers and reduces at once."""
    left: int = 0
    """The most bytes of gradients that one stretch of compute leaves behind."""
    reduced: int = 0
    """These, and what else is on its way meanwhile."""
    slots: int = 3
    """Chunks in memory during a step."""


class ByteRoom:
    """Admits transfers while what they hold stays within a limit; one alone is always admitted."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._held = 0
        self._changed = threading.Condition()

    def enter(self, count: int) -> None:
        """Wait until there is room for `count` bytes, and take it."""
        with self._changed:
            while self.limit is not None and self._held and self._held + count > self.limit:
                self._changed.wait()
            self._held += count

    def leave(self, count: int) -> None:
        """Give room back."""
        with self._changed:
            self._held -= count
            self._changed.notify_all()
