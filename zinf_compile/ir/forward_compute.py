"""The compute of a forward as plain values: what it reads and makes, and what of it runs a second time in the backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Compute of a forward between two transfers, which is compiled as one."""

    unit: str
    """The first parameter that it reads; empty where it reads none."""
    reads: frozenset[str]
    """Values that other compute, or a lookup of rows, has made."""
    makes: frozenset[str]
    repeatable: bool = True
    """Whether it gives the same a second time."""
    reads_others: bool = False
    """Whether it reads further parameters than the first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remake:
    """The decision. Compute is numbered as it was given."""

    blocks: tuple[tuple[int, ...], ...] = ()
    """What runs again together, in the order of the forward."""
    dropped: frozenset[str] = frozenset()
    """Saved values that these make again."""
    kept: frozenset[str] = frozenset()
    """Values that these read, and don't make."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """What it takes in one micro-batch that some blocks run again."""

    blocks: int = 0
    seconds: float = 0.0
    """Of compute."""
    lanes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of links between ranks, by lane."""
    fetched: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of shards that come from their homes once more, by unit."""


NOTHING_AGAIN = Again()
"""Every block keeps what it saves."""
