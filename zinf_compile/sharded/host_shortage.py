"""Host memory for whole values outside of graphs: whether there is room, and which caps work where there is none."""

from __future__ import annotations

import gc
import math
from typing import NamedTuple

from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.named_caps import name_host_memory
from zinf_compile.runtime.system.host_limits import RESERVE, usable_host_bytes

from .shortage import name_device_memory


class Shortage(NamedTuple):
    """The bytes that are missing."""

    available: int
    """Bytes."""
    named: str
    """A sentence that names the smallest caps that work."""


def host_shortage(context: Context, needed: int) -> Shortage | None:
    """Return what is missing of `needed` bytes of host memory beside what is held; None where there is room.

    Models that nobody uses any more are dropped first, and idle blocks for staging, of which there are more under larger caps:
    the cap that is named follows from what is held.
    """
    if needed <= host_room_bytes(context):
        return None
    gc.collect()
    context.memory.staging.clear()
    available = host_room_bytes(context)
    if needed <= available:
        return None
    reservations, named = context.memory.reservations, []
    of_host = context.memory.host_ledger.total()[0] + needed
    of_device = context.memory.ledger.total()[0] + needed
    if (
        reservations.declared_device is not None
        and not context.link.topology.host_apart
        and of_device > reservations.declared_device
    ):
        named.append(name_device_memory(context, of_device))
    if reservations.declared_host is not None and of_host > reservations.declared_host:
        named.append(name_host_memory(of_host))
    if needed > usable_host_bytes():
        named.append(f"{math.ceil(needed / (1 - RESERVE)):,} bytes of memory would have to be free for this process")
    text = "; ".join(named)
    return Shortage(available, text[:1].upper() + text[1:])


def host_room_bytes(context: Context) -> int:
    """Return the host memory that this rank could take now beside what it holds, within the caps that were declared."""
    reservations, room = context.memory.reservations, usable_host_bytes()
    if reservations.declared_host is not None:
        room = min(room, reservations.declared_host - context.memory.host_ledger.total()[0])
    if not context.link.topology.host_apart and reservations.declared_device is not None:
        room = min(room, reservations.declared_device - context.memory.ledger.total()[0])
    return max(0, room)
