"""Full units that stay on the device until their values change, so that a step gathers each once: `reshard_after_backward=False`.

Note: present values
    A copy is made by the first gather behind a change, and dropped by the next change: by `Unit.changing`, and at the beginning
    of a step of an optimizer that has the parameter. A unit whose memory others have, who may change it unseen, has no copy. All
    ranks have copies of the same units: they compare them before each run of a graph.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch


class Copied(Protocol):
    """A `Unit`, as far as there are copies of it."""

    serial: int

    @property
    def aliased(self) -> bool:
        """See `Unit.aliased`."""


class FullCopies:
    """The full units of a rank that stay, each in the type of the gather that made it. Any thread may call."""

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[Copied, torch.Tensor] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # a unit that is dropped may call from inside

    def __bool__(self) -> bool:
        """Say whether there is one."""
        return bool(self._copies)

    def holds(self, unit: Copied) -> bool:
        """Say whether a unit's present values are there, in whatever type."""
        if unit in self._copies and unit.aliased:
            self.drop(unit)
        return unit in self._copies

    def find(self, unit: Copied, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a unit's present values in a type, in the parameter's shape; None where they are not there."""
        copy = self._copies.get(unit) if self.holds(unit) else None
        return copy if copy is not None and copy.dtype == dtype else None

    def keep(self, unit: Copied, full: torch.Tensor) -> None:
        """Keep a gathered unit, in memory that nothing else uses; the first of several types."""
        if not unit.aliased:
            with self._lock:
                self._copies.setdefault(unit, full)

    def drop(self, unit: Copied) -> None:
        """Have no copy of a unit, whose values are about to change."""
        if self._copies:
            with self._lock:
                self._copies.pop(unit, None)

    def serials(self) -> tuple[int, ...]:
        """Return the numbers of the units that have a copy."""
        with self._lock:
            return tuple(sorted(unit.serial for unit in self._copies))

    @property
    def bytes(self) -> int:
        """The bytes of all of them."""
        with self._lock:
            return sum(copy.nbytes for copy in self._copies.values())
