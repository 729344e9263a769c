"""The whole value of a unit that lives off the device, for eager code of a single process, within the caps.

`zinf_compile.sharded.offloaded_storage` calls this. Nothing here is part of a schedule.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import torch

from zinf_compile.errors import BudgetError
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.memory.named_caps import name_cap
from zinf_compile.runtime.memory.own_storage import with_own_storage
from zinf_compile.runtime.storage.mapped_file import map_copy
from zinf_compile.runtime.system.process_wide import process_wide

from .unit import Unit

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context

_largest: weakref.WeakKeyDictionary[Context, tuple[int, int]] = process_wide(weakref.WeakKeyDictionary())
"""By context: its number of units, and the bytes of the largest."""


def fetch(unit: Unit) -> torch.Tensor:
    """Return the value as it is after the last step: flat, on the device, in counted memory of its own.

    Raises `BudgetError` where that exceeds a cap, `StepFailedError` where the step failed that was to update it.
    """
    context = unit.context
    if context.link.topology.host_apart:
        if unit.resident is None:
            reserve(unit, context.memory.host_ledger)
        reserve(unit, context.memory.ledger)
        value = unit.load()
        context.memory.ledger.track("staging", value)
        return value
    reserve(unit, context.memory.ledger)
    return unit.load()


def fetch_to_host(unit: Unit) -> torch.Tensor:
    """Return the value flat in host memory, to be read and dropped: its backing, where that is host memory. Raises as `fetch`."""
    context = unit.context
    if not context.link.topology.host_apart:
        return fetch(unit)
    if unit.resident is not None:
        context.link.wait_read(unit.resident)
        return with_own_storage(unit.resident)
    reserve(unit, context.memory.host_ledger)
    return unit.read_to_host()


def blank(unit: Unit) -> torch.Tensor:
    """Return memory to be filled with a new value and then kept by `Unit.save`. Raises as `fetch`."""
    reserve(unit, unit.context.memory.ledger)
    value = unit.blank()
    unit.context.memory.ledger.track("staging", value)
    return value


class PinnedValue:
    """The value of a unit at a fixed address, for readers through a pointer.

    In memory where the caps leave room for that beside one more value and what graphs gather; else in a file on the unit's
    drive. `current` brings what later steps made of it to the same address.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit, self._version = unit, _version(unit)
        context, backing = unit.context, unit.backing
        value = fetch(unit)
        if backing is not None and context.link.topology.reads_at_once(backing.tier):
            beside = max(largest_bytes(context), context.memory.reservations.passing)
            if not context.memory.has_room(context.memory.ledger, beside):
                value = map_copy(value, unit.placement.nvme[0])
        self._value = value

    def current(self) -> torch.Tensor:
        """Return the value as it is after the last step, flat."""
        version = _version(self._unit)
        if version != self._version:
            self._value.copy_(fetch(self._unit))
            self._version = version
        return self._value

    def changed(self, value: torch.Tensor) -> None:
        """Take over a value that was just written to the unit's backing."""
        self._value.copy_(value)
        self._version = _version(self._unit)


def largest_bytes(context: Context) -> int:
    """Return the bytes of the largest unit whose shard is off the device, 0 without one."""
    count, largest = _largest.get(context, (-1, 0))
    if count != len(context.units):
        largest = max((unit.bytes for unit in context.units if unit.backing is not None), default=0)
        _largest[context] = len(context.units), largest
    return largest


def shortage(unit: Unit, ledger: Ledger, size: int | None = None) -> str:
    """Describe by how much a value exceeds a cap; empty where it fits. `size`: its bytes; None: those of the unit."""
    context = unit.context
    size = unit.bytes if size is None else size
    if context.memory.has_room(ledger, size):
        return ""
    on_device = ledger is context.memory.ledger
    cap = context.memory.reservations.device_cap if on_device else context.memory.reservations.host_cap
    held = ledger.total()[0]
    named = name_cap(context.memory, ledger, context.memory.least_cap(ledger, size))
    return f"parameter {unit.name} takes {size:,} bytes whole; {held:,} are held beside it and {cap:,} are allowed. {named}"


def reserve(unit: Unit, ledger: Ledger, size: int | None = None) -> None:
    """Make room for one value; raise `BudgetError` where there is none. `size`: its bytes; None: those of the unit."""
    context = unit.context
    needed = unit.bytes if size is None else size
    context.memory.make_room(ledger, needed)
    if context.memory.has_room(ledger, needed):
        return
    unit.wait_updated()  # a step that goes on holds chunks
    gc.collect()
    if short := shortage(unit, ledger, needed):
        raise BudgetError(f"{short}. Drop what was read before and is still referred to, or raise the cap")


def _version(unit: Unit) -> int:
    """Return the version of the unit's parameter."""
    parameter = unit.parameter()
    return -1 if parameter is None else parameter._version
