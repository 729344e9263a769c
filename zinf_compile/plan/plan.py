"""The values that passes and the budget exchange: the memory that a graph needs, and how far ahead it runs."""

from __future__ import annotations

import dataclasses

from zinf_compile.ir.sizes import Sides

BUCKETS_GATHERED = 3
"""The gathers of one graph run ahead while no more than this many buckets are gathered, or as much as memory has room for."""

BUCKETS_ON_THE_WAY = 5
"""The same of its swaps: buckets that are gathered or on their way to the device."""

BUCKETS_REDUCED = 4
"""Full gradients on their way to their tier or to other ranks, where there is room for as many."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphMemory:
    """The least memory of the device in which one graph's schedule can run, in bytes."""

    gathered: int
    """Full units held at once when each is gathered just before its use."""
    rows: int
    """What rows that are looked up take on their way."""
    largest: str
    """A parameter among those held then."""
    narrowed: bool
    """Some are gathered in a narrower type than their own: a copy, even where nothing travels."""
    widening: float
    """The most by which a unit's own type is wider than its gather's; a shard that is swapped in arrives in its own."""
    cast: int
    """The largest that is gathered in a narrower type, in that: on a single rank both are there while it is cast."""
    converted: int
    """The most bytes of gradients, in their own type, that are cast together to that in which they are reduced."""
    left: int
    """The most bytes of gradients that one stretch of compute leaves behind, while they are cast in both types."""
    reduced: int
    """The same with the last transfer of the stretch before, which may still be under way."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """What one graph takes beside the least, where there is room for it, in bytes."""

    ahead: int
    """Full units that are gathered, or on their way, before their use; in their own types."""
    reduced: int
    """Full gradients that are on their way while compute makes more."""
    staging: int
    """Blocks on their way between memory and a drive."""
    chunk_buffers: int
    """Chunks of the optimizer's step in memory at a time, the first one included."""
    wish: Sides
    """What it would take with no caps."""
