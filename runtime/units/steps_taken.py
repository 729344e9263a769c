"""The optimizer steps of units: noted at each step, added up where ranks compare them."""

from __future__ import annotations

from collections.abc import Iterable

from zinf_compile.runtime.comm.steps_done import BITS, StepDone, describe
from zinf_compile.runtime.context import Context

from .unit import Unit


def note_step(done: StepDone, units: Iterable[Unit], context: Context) -> None:
    """Add a step to what its units went through."""
    for unit in units:
        unit.steps_digest = (unit.steps_digest + done.digest) & BITS
        unit.last_step = done
    context.steps_clock += 1
    context.steps_digest = (context.steps_digest + done.digest) & BITS
    context.last_step = done


def forget_steps(units: Iterable[Unit]) -> None:
    """All ranks have just given these units whole values: what they went through before counts no more."""
    for unit in units:
        context = unit.context
        unit.steps_digest, unit.last_step = 0, None
        context.steps_clock += 1
        context.steps_digest, context.last_step = 0, None


def digest_of_steps(units: Iterable[Unit]) -> int:
    """Return a hash of the steps that units went through, 0 before the first."""
    return sum((2 * place + 1) * unit.steps_digest for place, unit in enumerate(units)) & BITS


def describe_steps(units: Iterable[Unit]) -> list[str]:
    """Return the last step of each optimizer of these units, line by line, and a hash of all."""
    units = list(units)
    return describe({id(unit.last_step): unit.last_step for unit in units}.values(), digest_of_steps(units))
