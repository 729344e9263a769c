"""Memory that a forward saves for its backward, and the tier where it lives meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .tiers import Tier

RECOMPUTE = "recompute"
"""Word for saved values that are dropped and made again in the backward, beside the tiers where they may live."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedMemory:
    """One memory, with all values that are saved of it: itself, or views of it."""

    name: str
    """The first of them, by the name that both graphs have for it."""
    outputs: tuple[int, ...]
    """Their positions among the forward's outputs."""
    inputs: tuple[str, ...]
    """The backward's placeholders, in the same order."""
    bytes: int
    """What moves, dynamic sizes as traced."""
    dynamic: bool = False
    """Whether that changes from call to call."""
    tier: Tier = Tier.DEVICE
    lag: int = 1
    """Stretches of compute behind its last use beside which its first hop away runs: until their end the device holds it."""
    lead: int = 1
    """Stretches of compute in front of its first use beside which its last hop back runs."""


def bytes_in_memory(moving: Iterable[SavedMemory]) -> int:
    """Return the bytes of what lives in memory, by its tier."""
    return sum(memory.bytes for memory in moving if memory.tier.in_memory)
