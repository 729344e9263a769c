"""Partitioned parameters that nothing has used yet: they may still be cut into other tiles; and those that no graph has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zinf_compile._torch import no_torch_function
from zinf_compile.sharded.parameter import unit_of
from zinf_compile.sharded.unplanned import is_unplanned

from .record import all_records


def are_unused(values: Iterable[Any]) -> bool:
    """Return whether no graph, gradient, chunked state or save belongs to the partitioned parameters among these values."""
    found = [(value, unit) for value in values if (unit := unit_of(value)) is not None]
    if not all(is_unplanned(unit) and unit.saving is None for _, unit in found):
        return False
    with no_torch_function():
        if any(value.grad is not None for value, _ in found):
            return False
    stepped = {id(p) for _, record in all_records() for offloaded in record.offloaded or () for p in offloaded.kept}
    return stepped.isdisjoint(id(value) for value, _ in found)


def free_buffers_of(values: Iterable[Any]) -> None:
    """Free the chunks' buffers of optimizers whose states were loaded before a graph planned for these parameters.

    The graph counts chunks of its own, and the next step makes as many buffers as graphs have planned for by then.
    """
    first = {id(value) for value in values if (unit := unit_of(value)) is not None and is_unplanned(unit)}
    for _, record in all_records():
        for states in record.offloaded or () if record.deferred is None else ():
            if any(id(parameter) in first for parameter in states.kept):
                states.transfers.free_buffers()
