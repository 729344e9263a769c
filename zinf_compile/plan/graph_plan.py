"""Values that passes and the budget exchange: memory needs of a graph, and how far ahead it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from zinf_compile.ir.sizes import Sides

BUCKETS_GATHERED = 3
"""Default limit of buckets gathered at once. Gathers run ahead up to it, and further if memory allows."""

BUCKETS_ON_THE_WAY = 5
"""Default limit for swaps: buckets gathered or being swapped in."""

BUCKETS_REDUCED = 4
"""Limit, in buckets, of full gradients being reduced or swapped out, if memory allows."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphMemory:
    """Minimum device memory of one graph's schedule, in bytes."""

    gathered: int
    """Peak of full units if each is gathered just before its use."""
    rows: int
    """Peak of rows in transfer."""
    largest: str
    """Name of a parameter gathered at that peak, for messages."""
    narrowed: bool
    """True if a unit is gathered in a narrower type than its own, which is a copy even on one rank."""
    widening: float
    """Largest ratio of a unit's own bytes to its gather's. Shards are swapped in in their own type."""
    cast: int
    """Largest unit gathered in a narrower type, in that type. On one rank both forms exist during the cast."""
    converted: int
    """Peak of gradients, in their own type, that are cast together to the type of their reduction."""
    left: int
    """Peak of gradients that one region computes, in both types during the cast."""
    reduced: int
    """The same, plus the last transfer of the region before, which may still be running."""


class GraphRoom(NamedTuple):
    """Bytes for the units of a graph that are gathered, or on their way to be."""

    device: float
    host: float
    more: Sequence[int] = ()
    """What the device has more of in each region than in that with the least; none given: nothing."""
    results: int = 0
    """Bytes of the graph's results, which the caller gets."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Memory that one graph uses beyond its minimum, in bytes."""

    ahead: int
    """Full units gathered or being swapped in ahead of their use, in their own types."""
    reduced: int
    """Full gradients being reduced or swapped out during compute."""
    staging: int
    """Blocks being read or written."""
    chunk_buffers: int
    """Number of chunks of the optimizer's step in memory at once."""
    wish: Sides
    """Memory that it would use without caps."""
