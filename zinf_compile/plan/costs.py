"""What regions, links and updates cost, as measured on steps that ran: plain values that problems are made with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from .problem import StepProblem
from .problem_parts import Link, Region

LARGE_BYTES = 1 << 18
"""Transfers of at least this size say what a link's rate is, smaller ones what each of them takes beside."""
MOST_LATENCY = 1e-3
"""Seconds; more is no latency, but a link that waits for something else."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkCost:
    """Of one link, for one rank."""

    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs; what was not measured is not there, and estimated."""

    regions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds by region structure."""
    links: Mapping[str, LinkCost] = dataclasses.field(default_factory=dict)
    update_seconds: float = 0.0
    """Of all updates of a step; 0: not measured."""

    def link(self, link: Link) -> Link:
        """Return a link with its measured rate."""
        cost = self.links.get(link.name)
        if cost is None:
            return link
        rate = cost.bytes_per_second * link.sharers
        return dataclasses.replace(link, bytes_per_second=rate, latency_seconds=cost.latency_seconds, beside=())

    def of_regions(self, problem: StepProblem, seconds: Iterable[float]) -> StepProblem:
        """Return a problem with these seconds of its regions, in order (0: as it was), and measured links."""
        regions: list[Region] = [
            dataclasses.replace(region, seconds=measured) if measured else region
            for region, measured in zip(problem.regions, seconds, strict=True)
        ]
        return dataclasses.replace(problem, regions=tuple(regions), links=tuple(map(self.link, problem.links)))

    def of_updates(self, problem: StepProblem) -> StepProblem:
        """Return a problem whose updates take together as long as was measured."""
        assumed = math.fsum(piece.host_seconds for piece in problem.pieces)
        if not (self.update_seconds and assumed):
            return problem
        scale = self.update_seconds / assumed
        pieces = (
            dataclasses.replace(piece, host_seconds=piece.host_seconds * scale, device_seconds=piece.host_seconds * scale)
            for piece in problem.pieces
        )
        return dataclasses.replace(problem, pieces=tuple(pieces))


def link_cost(transfers: Iterable[tuple[float, float, int]], assumed: Link) -> LinkCost | None:
    """Return the cost of a link from (start, end, bytes) of what it moved; None where that is too little to tell.

    Transfers may overlap: what counts is when the link was busy. At this cost the large ones take together, one after the other,
    the time for which they kept it busy, and the small ones what they added to that, unless that is more than a latency may be.
    """
    spans = sorted(transfers)
    large = [span for span in spans if span[2] >= LARGE_BYTES]
    small = len(spans) - len(large)
    moved = sum(count for _, _, count in large)
    if moved < 4 * LARGE_BYTES:
        return None
    busy, latency = max(_busy(large), 1e-9), assumed.latency_seconds
    if small:  # of so many bytes each takes a latency, and its part of the rate
        part = sum(count for _, _, count in spans) / moved - 1
        latency = (_busy(spans) - busy - part * busy) / (small - part * len(large))
    latency = min(max(latency, 0.0), MOST_LATENCY, busy / (2 * len(large)))
    return LinkCost(moved / (busy - latency * len(large)), latency)


def _busy(spans: Iterable[tuple[float, float, int]]) -> float:
    total, reached = 0.0, -math.inf
    for start, end, _ in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
