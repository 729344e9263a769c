"""Units that were made before any graph: nothing has planned for their gradients and updates yet, or used them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.units.unit import Unit

_unplanned: weakref.WeakSet[Unit] = process_wide(weakref.WeakSet())


def plan_later(units: Iterable[Unit]) -> None:
    """Let the first graph that uses these units plan for their gradients and updates."""
    _unplanned.update(units)


def is_unplanned(unit: Unit) -> bool:
    """Return whether no graph has planned for a unit that was made before."""
    return unit in _unplanned


def planned(units: Iterable[Unit]) -> None:
    """Note that a graph has planned for these units, and is going to use them."""
    _unplanned.difference_update(units)
