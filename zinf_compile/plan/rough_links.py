"""Links and devices at rough rates, where nobody has measured: an error makes a plan slower, never wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from zinf_compile.ir.tiers import Tier

from .problem_parts import Link

DRIVE, COPIES, BETWEEN_RANKS = 2e9, 2e10, 1e10
"""Bytes per second of links: of a drive, between host and device, and between ranks."""


_FLOPS = {"cpu": 2e11, "cuda": 1e14}
"""Per second of compute, by type of device."""

_BYTES = {"cpu": 2e10, "cuda": 1e12}
"""Per second of the device's memory."""


def rough_flops(kind: str) -> float:
    """Return the operations per second of a type of device."""
    return _FLOPS.get(kind, 1e14)


def rough_bytes(kind: str) -> float:
    """Return the bytes per second of the memory of a type of device."""
    return _BYTES.get(kind, 1e12)


def rough_links(tiers: Sequence[Tier], size: int) -> Iterator[Link]:
    """Yield links between tiers from near to far, and between `size` ranks; a drive reads and writes on one lane."""
    for near, far in itertools.pairwise(tiers):
        for source, to in ((near, far), (far, near)):
            rate, lane = (COPIES, "") if far.in_memory else (DRIVE, str(far))
            yield Link(name=f"{source} to {to}", source=source, destination=to, bytes_per_second=rate, lane=lane)
    if size > 1:
        yield Link(name="from ranks", source=None, destination=Tier.DEVICE, bytes_per_second=BETWEEN_RANKS)
        yield Link(name="to ranks", source=Tier.DEVICE, destination=None, bytes_per_second=BETWEEN_RANKS)
