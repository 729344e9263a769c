"""When pieces of states are updated: all behind the last region, or each just before its units are used again."""

from __future__ import annotations

from collections.abc import Mapping

from zinf_compile.ir.sizes import CHUNK_BUFFERS
from zinf_compile.plan.plan import Homes, Update
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import StatePiece

from ._build import update_tier

WINDOW = 3
"""Regions before its use in which a piece's transfers start, where they share a link with what the regions fetch."""


def deferred(problem: StepProblem, homes: Homes, *, buffers: int = CHUNK_BUFFERS) -> tuple[Update, ...]:
    """Return updates in the order of their units' first uses, due at these."""
    count, device = problem.count, problem.device
    first = {unit.name: min((*unit.uses, *unit.gradients)) for unit in problem.units}
    paced = _shares_links(problem, homes)
    found: list[Update] = []
    for piece in sorted(problem.pieces, key=lambda piece: _first(piece, first)):
        on = update_tier(problem, homes.states[piece.name])
        use = _first(piece, first) if piece.deferrable else 0
        start = count + (max(0, use - WINDOW) if paced else 0)
        if len(found) >= buffers and found[-buffers].on == device:
            start = max(start, found[-buffers].due)
        start = max(start, found[-1].start if found else 0)
        due = count + use
        found.append(Update(piece.name, on, min(start, due), due))
    return tuple(found)


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
