"""Gradients in memory that deferred steps have still to apply: there beside the next forward, but never beside a backward.

A step registers here; graphs wait where they make gradients, or where memory is short. Knows no optimizer.
"""

from __future__ import annotations

from typing import Protocol

from zinf_compile._torch import compile_lock
from zinf_compile.ir.sizes import Sides


class GradientHolder(Protocol):
    """A step under way."""

    def gradient_bytes(self) -> Sides:
        """Return the bytes of gradients that only the step has still a use for."""

    def settle(self) -> None:
        """Return when it has applied them all, or failed."""


class PendingGradients:
    """The steps of one rank that hold gradients in memory."""

    def __init__(self) -> None:
        self._holders: list[GradientHolder] = []

    def add(self, holder: GradientHolder) -> None:
        """Count a step's gradients until `remove`."""
        self._holders.append(holder)

    def remove(self, holder: GradientHolder) -> None:
        """Count a step no longer: it is over. Any thread may call, more than once."""
        self._holders = [other for other in self._holders if other is not holder]

    def bytes(self) -> Sides:
        """Return the bytes that are freed when all of them are over."""
        total = Sides(0, 0)
        for holder in self._holders:
            total = total.plus(holder.gradient_bytes())
        return total

    def wait(self) -> bool:
        """Return when none is left, and whether that is so: not while this thread compiles, for which steps wait."""
        if compile_lock._is_owned():  # type: ignore[attr-defined]
            return not self._holders
        for holder in list(self._holders):
            holder.settle()
            self.remove(holder)
        return True
