"""The runtime's own account of what it holds, in bytes."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import Literal

import torch

Kind = Literal["params", "grads", "states", "gathered"]
KINDS: tuple[Kind, ...] = ("params", "grads", "states", "gathered")


class Ledger:
    """Count bytes by kind, now and at the peak; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may run inside any allocation, also one made under this lock
        self._now: collections.Counter[str] = collections.Counter()
        self._peak: collections.Counter[str] = collections.Counter()

    def add(self, kind: Kind, count: int) -> None:
        """Count `count` more bytes (fewer, when negative)."""
        with self._lock:
            self._now[kind] += count
            self._peak[kind] = max(self._peak[kind], self._now[kind])

    def track(self, kind: Kind, tensor: torch.Tensor) -> None:
        """Count a tensor's bytes until it is dropped."""
        count = tensor.numel() * tensor.element_size()
        self.add(kind, count)
        weakref.finalize(tensor, self.add, kind, -count).atexit = False

    def now(self) -> dict[str, int]:
        """Return the bytes held, by kind."""
        with self._lock:
            return {kind: self._now[kind] for kind in KINDS}

    def peak(self) -> dict[str, int]:
        """Return the most bytes held at any time, by kind."""
        with self._lock:
            return {kind: self._peak[kind] for kind in KINDS}
