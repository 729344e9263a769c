"""A plan as passes look things up in it: by the parameters and regions of one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property

from torch import fx

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Fetch, Gather, Kind, Plan


@dataclasses.dataclass(frozen=True)
class PlannedGraph:
    """A plan, and which of its regions and units are those of a graph. Regions are numbered within the graph here."""

    plan: Plan
    units: Mapping[str, str]
    """The unit of each parameter, or tile, by its name."""
    first: int = 0
    """The number of the graph's first region in the plan."""
    leaves: frozenset[str] = frozenset()
    """The units that a forward leaves on the device for its backward."""
    finds: frozenset[str] = frozenset()
    """The units that a backward finds there."""

    def gather_of(self, parameter: str, region: int) -> Gather | None:
        """Return the gather for which a region waits, or whose unit it still finds; None where nothing is planned."""
        return next((row for row in self._gathers.get(self.units.get(parameter, ""), ()) if self._reads(row, region)), None)

    def fetch_of(self, parameter: str, region: int) -> Fetch | None:
        """Return the fetch to the device that brings what a region reads, or what its gather takes."""
        return self._arriving(parameter, region, Tier.DEVICE)

    def starts_gather(self, parameter: str, region: int) -> int:
        """Return the boundary at which the gather for a region starts: the region's own where nothing is planned."""
        row = self.gather_of(parameter, region)
        return region if row is None else max(0, row.start - self.first)

    def starts_hop(self, parameter: str, region: int, source: Tier, to: Tier) -> int:
        """Return the boundary at which a shard's hop starts, for a unit that a region waits for."""
        row = next((row for row in self._hops(parameter, region) if (row.source, row.to) == (source, to)), None)
        return region if row is None else max(0, row.start - self.first)

    def brings(self, parameter: str, region: int) -> bool:
        """Say whether the region is the first to read a unit that is brought for it; False: it is still there."""
        row: Gather | Fetch | None = self.gather_of(parameter, region) or self.fetch_of(parameter, region)
        return row is None or row.due >= region + self.first

    def _reads(self, row: Gather | Fetch, region: int) -> bool:
        return row.due <= region + self.first < row.until

    def _hops(self, parameter: str, region: int) -> list[Fetch]:
        """Return the hops that bring a shard, the last one first."""
        found: list[Fetch] = []
        row = self._arriving(parameter, region, Tier.DEVICE)
        while row is not None:
            found.append(row)
            earlier = self._fetches.get((self.units[parameter], row.source), ())
            row = next((each for each in earlier if each.start <= found[-1].start < each.until), None)
        return found

    def _arriving(self, parameter: str, region: int, to: Tier) -> Fetch | None:
        rows = self._fetches.get((self.units.get(parameter, ""), to), ())
        gather = self.gather_of(parameter, region)
        if gather is not None:  # the shard is there while it is gathered
            return next((row for row in rows if row.serves(gather)), None)
        return next((row for row in rows if self._reads(row, region)), None)

    @cached_property
    def _gathers(self) -> Mapping[str, list[Gather]]:
        found: dict[str, list[Gather]] = {}
        for row in self.plan.shared.gathers:
            found.setdefault(row.unit, []).append(row)
        return found

    @cached_property
    def _fetches(self) -> Mapping[tuple[str, Tier], list[Fetch]]:
        found: dict[tuple[str, Tier], list[Fetch]] = {}
        for row in self.plan.local.fetches:
            if row.kind is Kind.PARAM:
                found.setdefault((row.name, row.to), []).append(row)
        return found


Planner = Callable[[fx.Graph], PlannedGraph]
"""Plans a graph that `region_passes` have seen."""
