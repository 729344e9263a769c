"""Placements of the parameters of one graph: some of their states may live nearer to the device than those of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .program import ParameterSlot
from .tiers import Placement, Tier

KINDS = ("params", "grads", "optimizer")
"""Fields of a `Placement` that are tiers of states. The others are the same for all parameters of a graph."""


@dataclasses.dataclass(frozen=True)
class Placements:
    """A placement for each parameter."""

    rest: Placement
    """Of parameters that have none of their own."""
    own: Mapping[int, Placement] = dataclasses.field(default_factory=dict)
    """By `ParameterSlot.index`."""

    def of(self, slot: ParameterSlot) -> Placement:
        """Return the placement of a parameter, or of the one that a tile is of; see `Placement.of_parameter`."""
        placement = self.own.get(slot.index, self.rest)
        return placement if slot.tile is not None else placement.of_parameter(dim=len(slot.shape), numel=slot.numel)

    def nearest(self, slots: Iterable[ParameterSlot]) -> Placement:
        """Return for each kind of state the nearest tier on which some of it lives."""
        found = [self.of(slot) for slot in slots if slot.shape and slot.numel]
        tiers: dict[str, Any] = {}
        for kind in KINDS:
            tiers[kind] = min((getattr(each, kind) for each in found), key=_distance, default=Tier.DEVICE)
        return dataclasses.replace(self.rest, **tiers)


def _distance(tier: Tier) -> int:
    return tier.distance


def as_placements(given: Placement | Placements) -> Placements:
    """Return placements, where one may be given for all parameters."""
    return given if isinstance(given, Placements) else Placements(given)


__all__ = ["KINDS", "Placements", "as_placements"]
