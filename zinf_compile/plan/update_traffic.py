"""What one update of a piece of states moves over links, and holds in buffers, given the homes that a plan chose."""

from __future__ import annotations

import dataclasses

from zinf_compile.ir.tiers import Tier

from .plan import Homes
from .problem import StepProblem
from .problem_parts import Link, StatePiece


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateTraffic:
    """Of one piece. Links without bytes are left out."""

    reads: tuple[tuple[Link, int], ...]
    """Toward the update, farthest link first."""
    writes: tuple[tuple[Link, int], ...]
    """Away from it, nearest link first."""
    buffers: dict[Tier, int]
    """Bytes on each tier in memory that passes through or is worked on there and lives elsewhere."""
    seconds: float
    """Of the update itself, by the device or by the host, whoever computes it."""
    values_written: tuple[Link, ...]
    """The links that new values pass on their way home."""
    takes_compute: bool
    """Whether the device computes it, between regions. Where its memory is the host's, a thread of the host updates what comes
    from elsewhere beside the regions."""


def update_traffic(problem: StepProblem, homes: Homes, piece: StatePiece, on: Tier) -> UpdateTraffic:
    """Return what an update of the piece on a tier moves: states, gradients and old values there, states and new values home."""
    unit = piece.units[0]
    return _traffic(problem, piece, homes.states[piece.name], homes.params[unit], homes.grads[unit], on)


def _traffic(problem: StepProblem, piece: StatePiece, state: Tier, value: Tier, gradient: Tier, on: Tier) -> UpdateTraffic:
    key = (piece.name, state, value, gradient, on)
    if key not in problem.traffic:
        problem.traffic[key] = _make(problem, piece, state, value, gradient, on)
    found: UpdateTraffic = problem.traffic[key]
    return found


def _make(problem: StepProblem, piece: StatePiece, state: Tier, value: Tier, gradient: Tier, on: Tier) -> UpdateTraffic:
    reads: dict[str, tuple[Link, int]] = {}
    writes: dict[str, tuple[Link, int]] = {}
    buffers = dict.fromkeys((tier for tier in problem.tiers if tier.in_memory), 0)
    moved = (
        (state, piece.read_bytes, piece.written_bytes, piece.state_bytes),
        (gradient, piece.gradient_bytes, 0, piece.gradient_bytes),
        (value, piece.value_read_bytes, piece.value_bytes, piece.value_bytes),
    )
    for home, read, written, held in moved:
        coming, going = problem.hops(home, on), problem.hops(on, home)
        for links, count, table in ((coming, read, reads), (going, written, writes)):
            for link in links if count else ():
                table[link.name] = (link, table.get(link.name, (link, 0))[1] + count)
        if home != on and (read or written):
            passed = {on, *(link.destination for link in coming), *(link.source for link in going)} - {home, None}
            for tier in passed:
                if tier in buffers:
                    buffers[tier] += held
    order = problem.tiers.index
    buffers = {tier: count for tier, count in buffers.items() if count}
    takes_compute = on == problem.device and not (on == problem.host and buffers)
    return UpdateTraffic(
        reads=tuple(sorted(reads.values(), key=lambda row: _distance(problem, on, row[0].source), reverse=True)),
        writes=tuple(sorted(writes.values(), key=lambda row: abs(order(row[0].source) - order(on)) if row[0].source else 0)),
        buffers=buffers,
        seconds=piece.device_seconds if takes_compute else piece.host_seconds,
        values_written=problem.hops(on, value) if piece.value_bytes else (),
        takes_compute=takes_compute,
    )


def _distance(problem: StepProblem, on: Tier, tier: Tier | None) -> int:
    return abs(problem.tiers.index(tier) - problem.tiers.index(on)) if tier else 0
