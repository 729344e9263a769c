"""When pieces of states are updated: all behind the last region, or before their units are used again, as they arrive."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping

from zinf_compile.ir.sizes import CHUNK_BUFFERS
from zinf_compile.plan.plan import Homes, Update
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import StatePiece
from zinf_compile.plan.update_traffic import UpdateTraffic, update_traffic

from ._build import update_tier

WINDOW = 3
"""Regions before its use in which the transfers of a piece start that the device updates, where they share a link with what the
regions fetch. A thread of the host begins with the step, as far as there are buffers."""


def deferred(problem: StepProblem, homes: Homes, *, buffers: int = CHUNK_BUFFERS) -> tuple[Update, ...]:
    """Return updates in the order of their units' first uses, due at these at the latest.

    An update that takes the device's time runs between regions. One whose piece is read for it is due as soon as the read is
    expected to be over: then its buffer is written and free, and the next piece is read. What lives on the device takes no buffer
    and runs at its use.
    """
    count = problem.count
    first = {unit.name: min((*unit.uses, *unit.gradients)) for unit in problem.units}
    paced = _shares_links(problem, homes)
    pace = _Pace(problem)
    found: list[Update] = []
    moved: list[tuple[Update, UpdateTraffic]] = []
    for piece in sorted(problem.pieces, key=lambda piece: _first(piece, first)):
        on = update_tier(problem, homes.states[piece.name])
        traffic = update_traffic(problem, homes, piece, on)
        use = _first(piece, first) if piece.deferrable else 0
        start = count + (max(0, use - WINDOW) if paced and traffic.takes_compute else 0)
        if traffic.buffers and len(moved) >= buffers and moved[-buffers][1].takes_compute:
            start = max(start, moved[-buffers][0].due)
        start = max(start, found[-1].start if found else 0)
        due = count + use
        if traffic.buffers and traffic.takes_compute:
            due = min(due, count + pace.ready(traffic, start - count))
        found.append(Update(piece.name, on, min(start, due), due))
        if traffic.buffers:
            moved.append((found[-1], traffic))
    return tuple(found)


class _Pace:
    """Expects when pieces that follow each other are there, and written: the regions run one after the other meanwhile."""

    def __init__(self, problem: StepProblem) -> None:
        self._begins = [0.0, *itertools.accumulate(region.seconds for region in problem.regions)]
        self._read = self._written = 0.0
        """When the last read and the last write are over."""

    def ready(self, traffic: UpdateTraffic, start: int) -> int:
        """Return the boundary at which a piece that is read from boundary `start` on is there."""
        reads = math.fsum(link.seconds(count) for link, count in traffic.reads)
        writes = math.fsum(link.seconds(count) for link, count in traffic.writes)
        shared = any(link.beside for link, _ in traffic.reads)
        begin = max(self._begins[start], self._read)
        if shared:  # what one does, the other cannot
            begin = max(begin, self._written)
        self._read = begin + reads
        boundary = min(bisect.bisect_left(self._begins, self._read), len(self._begins) - 1)
        self._written = max(self._begins[boundary], self._written) + writes
        return boundary


def _first(piece: StatePiece, first: Mapping[str, int]) -> int:
    return min(first[name] for name in piece.units)


def _shares_links(problem: StepProblem, homes: Homes) -> bool:
    """Say whether regions fetch something over a link that updates read from."""
    fetched = {link.name for tier in set(homes.params.values()) for link in problem.hops(tier, problem.device)}
    read = {
        link.name
        for piece in problem.pieces
        for link in problem.hops(homes.states[piece.name], update_tier(problem, homes.states[piece.name]))
    }
    return bool(fetched & read)
