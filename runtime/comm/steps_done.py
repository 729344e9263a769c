"""The optimizer steps that the shards of units went through, as the ranks compare them.

A step is local: nothing of it tells a rank that another one skipped it, or took it with another learning rate. Then the shards of
one parameter belong to different steps. Each unit adds up a hash of its steps; every graph, save and end of a process compares.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from zinf_compile.ir.program import digest_of

STEPS = "step() of "
"""The beginning of each line about steps."""

BITS = (1 << 63) - 1
"""The bits of a digest."""


@dataclasses.dataclass(frozen=True)
class StepDone:
    """One step of one optimizer over the units of one context."""

    optimizer: str
    """The class."""
    number: int
    """Counts the optimizer's steps since it was made or its states were loaded."""
    settings: tuple[str, ...]
    """One line for each group: its settings when the step began, and the units that were updated with them; and one for each
    gradient that was whole."""

    @functools.cached_property
    def digest(self) -> int:
        """A hash that is equal on ranks that took the same step."""
        return digest_of([self.optimizer, str(self.number), *self.settings])

    def lines(self) -> list[str]:
        """Describe it."""
        times = "once" if self.number == 1 else f"{self.number} times"
        return [f"{STEPS}{self.optimizer} {times}, the last with {group}" for group in self.settings]


def describe(steps: Iterable[StepDone | None], digest: int) -> list[str]:
    """Describe the last steps of some optimizers, line by line, and a hash of all steps."""
    lines = [line for done in steps if done is not None for line in done.lines()]
    return [*(lines or [f"{STEPS}no optimizer yet"]), f"{STEPS}any optimizer so far: {digest:016x}"]


def mixed(digest: int, steps: int) -> int:
    """Return a hash of what is about to run and of the steps before it."""
    return (digest + 3 * steps) & BITS


def differ_in_steps(line: str, other: str) -> bool:
    """Say whether two lines, the first that differ between ranks, are about steps."""
    return line.startswith(STEPS) or other.startswith(STEPS)


ADVICE = (
    "An optimizer's step() was called on some ranks only (a guard such as `if not isfinite(loss): continue` must decide alike on "
    "all of them), or with other settings, such as the learning rate, or with other whole gradients, as those set by hand or "
    "computed inside gathered() are: shards of one parameter now belong to different steps. Load a checkpoint of model and "
    "optimizer on all ranks to go on from there"
)
"""Advice where ranks differ in a step."""
