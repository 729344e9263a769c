"""What happens between two `optimizer.step()`, as plain values: the problem that a plan solves.

Times are seconds, sizes bytes, both of one rank. Regions are numbered in the order in which they run, over all graphs and all
micro-batches of a step. `passes.analysis` makes problems from scheduled graphs; they are also read from JSON and written by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from zinf_compile.errors import PlanError
from zinf_compile.ir.tiers import Tier

from .as_json import read_json, write_json
from .problem_checks import check_problem
from .problem_parts import Link, ProblemParts

VERSION = 1
"""Of the JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepProblem(ProblemParts):
    """Everything that a planner may know of a step. Raises `PlanError` where its parts contradict each other."""

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        check_problem(self)

    @functools.cached_property
    def _links(self) -> dict[tuple[Tier | None, Tier | None], Link]:
        return {(link.source, link.destination): link for link in self.links}

    def link(self, source: Tier | None, destination: Tier | None) -> Link:
        """Return the link from one tier to its neighbour, or to or from the other ranks (None)."""
        found = self._links.get((source, destination))
        if found is None:
            raise PlanError(f"the problem has no link from {source or 'the other ranks'} to {destination or 'the other ranks'}")
        return found

    def hops(self, source: Tier, destination: Tier) -> tuple[Link, ...]:
        """Return the links from a tier to another one, in order; none where they are the same."""
        return self._hops[source, destination]

    @functools.cached_property
    def _hops(self) -> dict[tuple[Tier, Tier], tuple[Link, ...]]:
        found = {}
        for one, source in enumerate(self.tiers):
            for other, destination in enumerate(self.tiers):
                step = 1 if one < other else -1
                path = range(one, other, step)
                found[source, destination] = tuple(self.link(self.tiers[at], self.tiers[at + step]) for at in path)
        return found

    @functools.cached_property
    def traffic(self) -> dict[Any, Any]:
        """Return the table in which `update_traffic` keeps what it found."""
        return {}

    def room(self, tier: Tier) -> float:
        """Return the bytes that a plan may use on a tier."""
        return next(memory.room for memory in self.memories if memory.tier == tier)

    def with_budgets(self, **budgets: int | None) -> StepProblem:
        """Return the problem with other budgets, each under its tier's word."""
        unknown = budgets.keys() - set(self.tiers)
        if unknown:
            raise PlanError(f"budgets for {', '.join(sorted(unknown))}; the problem has {', '.join(self.tiers)}")
        memories = (
            dataclasses.replace(each, bytes=budgets[each.tier]) if each.tier in budgets else each for each in self.memories
        )
        return dataclasses.replace(self, memories=tuple(memories))

    @property
    def compute_seconds(self) -> float:
        """Return the seconds of all regions."""
        return math.fsum(region.seconds for region in self.regions)

    def to_json(self) -> str:
        """Return the problem as text that `from_json` reads."""
        return write_json(self, kind="step problem", version=VERSION)

    @classmethod
    def from_json(cls, text: str) -> StepProblem:
        """Read a problem; raises `PlanError` naming the field that is wrong."""
        return read_json(cls, text, kind="step problem", version=VERSION)


def gaps(uses: Sequence[int], count: int, *, cyclic: bool) -> Iterator[tuple[int, int]]:
    """Yield (use, next use) of consecutive uses; with `cyclic` the last one's next is the first of the following step."""
    yield from itertools.pairwise(uses)
    if cyclic and uses:
        yield uses[-1], uses[0] + count
