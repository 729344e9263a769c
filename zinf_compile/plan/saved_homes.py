"""Where the memory of saved values lives between forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier, Topology

LEAST_BYTES = 64 << 10
"""Less isn't worth moving: issuing a transfer takes as long as the link needs for about as much."""


def choose_homes(
    memories: Iterable[SavedMemory], tier: Tier, topology: Topology, *, least_bytes: int = LEAST_BYTES
) -> tuple[SavedMemory, ...]:
    """Return what leaves the device, all of it for one tier; nothing where that is the device, or its memory."""
    if not topology.is_offloaded(tier):
        return ()
    return tuple(dataclasses.replace(each, tier=tier) for each in memories if each.bytes >= least_bytes)
