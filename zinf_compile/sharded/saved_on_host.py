"""Host memory beside a device for the values that forwards save there: several graphs may do so before the first backward."""

from __future__ import annotations

import math
from collections.abc import Iterable

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.reservations import Reservation
from zinf_compile.runtime.units.unit import Unit

from .caps import held_bytes
from .compute_budget import units_without_gradient
from .short_ranks import Lack
from .shortage import gradient_bytes


def lack_on_host(
    context: Context, made: Iterable[Reservation], saved: int, units: Iterable[Unit], *, others: float
) -> Lack | None:
    """Return what a call of these units lacks that saves `saved` bytes there; None where it saves none.

    `made`: the reservations of the graph and its backward; `others`: how many times as much other graphs are expected to save.
    """
    memory, cap = context.memory, context.memory.reservations.host_cap
    if not saved or cap is None:
        return None
    passing = max((reservation.passing_host for reservation in made), default=0)
    gradients = gradient_bytes(context, units_without_gradient(units))[Tier.HOST]
    more = saved + passing + gradients
    held = held_bytes(memory.host_ledger, more, cap, memory)
    there = memory.host_ledger.now()["activations"]
    later = max(0, math.ceil(others * saved) - there)
    return Lack(
        needed=held + more,
        cap=cap,
        works=memory.reservations.works(Tier.HOST, held + saved + later + gradients),
        text=f"this call needs {held + more:,} bytes of host memory for each rank: {held - there + gradients:,} for what is held "
        f"and for gradients, {there:,} are activations of earlier calls whose backward is still to come, {saved:,} are its own, "
        f"{passing:,} are in flight from drives and to them. Run those backwards first, or use smaller batches; "
        "activations='nvme' moves all that is saved to a drive",
    )
