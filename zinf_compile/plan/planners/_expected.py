"""Seconds that a step is expected to take with given homes, before anything is planned: part by part, compute or a link.

Note: why by parts
    Updates run beside the regions until their units' first uses, which the forward has: a drive that carries all states there
    keeps compute waiting, though it idles in the backward. Sums over a whole step say nothing of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from zinf_compile.plan.bound_programme import link_weights
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Unit
from zinf_compile.plan.update_traffic import update_traffic

from ._build import needs_stays, update_tier

BESIDE, AFTER, BEHIND = range(3)
"""Parts of a step: regions until the last first use of a unit, the other regions, and what is behind the last region."""


class Expected:
    """Rates homes of one problem.

    `beside`: whether updates run beside the regions with given homes; None: with any.
    """

    def __init__(self, problem: StepProblem, beside: Callable[[Homes], bool] | None = None) -> None:
        self._problem, self._beside = problem, beside
        first = [min((*unit.uses, *unit.gradients)) for unit in problem.units]
        border = max(first, default=-1) + 1
        seconds = [region.seconds for region in problem.regions]
        self._compute = (sum(seconds[:border]), sum(seconds[border:]), 0.0)
        self._units = [
            (unit, self._fetches(unit, use, border), sum(region < border for region in unit.gradients))
            for unit, use in zip(problem.units, first, strict=True)
        ]
        self._ranks = self._between_ranks() if problem.world_size > 1 else ({}, {}, {})
        self._weights = link_weights(problem)

    def _fetches(self, unit: Unit, first: int, border: int) -> tuple[int, int, int]:
        """Return how often a shard comes in the first two parts, and how often of these an update hands it over."""
        beside = sum(use < border for use in unit.uses)
        handed = first in unit.uses and any(piece.deferrable for piece in self._problem.pieces_of[unit.name])
        return beside, len(unit.uses) - beside, int(handed)

    def _between_ranks(self) -> tuple[dict[str, float], ...]:
        """Return by link the seconds of gathers and reductions in each part, which no home changes."""
        gather, reduce = self._problem.link(None, self._problem.device), self._problem.link(self._problem.device, None)
        found: tuple[dict[str, float], ...] = tuple({gather.name: 0.0, reduce.name: 0.0} for _ in self._compute)
        for unit, (beside, after, _), early in self._units:
            found[BESIDE][gather.name] += beside * gather.seconds(unit.wire_bytes)
            found[AFTER][gather.name] += after * gather.seconds(unit.wire_bytes)
            reduced = reduce.seconds(unit.reduced_bytes)
            if unit.reduced_at_step:
                found[BEHIND][reduce.name] += reduced
            else:
                found[BESIDE][reduce.name] += early * reduced
                found[AFTER][reduce.name] += (len(unit.gradients) - early) * reduced
        return found

    def seconds(self, homes: Homes) -> float:
        """Return the seconds of a step with these homes in which each part takes as long as compute, or as its busiest link.

        All shards that are not on the device come for each use, and saved values stay.
        """
        problem = self._problem
        links = [defaultdict(float, each) for each in self._ranks]
        compute, host = list(self._compute), [0.0] * len(self._compute)
        defers = self._beside is None or self._beside(homes)
        for unit, (beside, after, handed), early in self._units:
            if needs_stays(unit, homes.params[unit.name], problem.device):
                for link in problem.hops(homes.params[unit.name], problem.device):
                    from_drive = link.source is not None and not link.source.in_memory
                    seconds = link.seconds(unit.stored_bytes)
                    links[BESIDE][link.name] += seconds * (beside - (handed if from_drive and defers else 0))
                    links[AFTER][link.name] += seconds * after
            if unit.trained:
                for link in problem.hops(problem.device, homes.grads[unit.name]):
                    seconds = link.seconds(unit.gradient_bytes)
                    links[BESIDE][link.name] += seconds * early
                    links[AFTER][link.name] += seconds * (len(unit.gradients) - early)
        for piece in problem.pieces:
            on, part = update_tier(problem, homes.states[piece.name]), BESIDE if piece.deferrable and defers else BEHIND
            traffic = update_traffic(problem, homes, piece, on)
            for link, count in (*traffic.reads, *traffic.writes):
                links[part][link.name] += link.seconds(count)
            if on == problem.device and traffic.takes_compute:
                compute[part] += traffic.seconds
            else:
                host[part] += traffic.seconds
        return sum(self._longest(*row) for row in zip(compute, host, links, strict=True))

    def _longest(self, compute: float, host: float, links: dict[str, float]) -> float:
        shared = (sum(weight * links[name] for name, weight in weights.items()) for weights in self._weights)
        return max(compute, host, *shared)
