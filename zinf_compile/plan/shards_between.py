"""Which shards several ranks leave on their devices between a forward and its backward. Each rank decides for itself.

A full unit that stays is every rank's decision, and takes the memory of all shards. Its shard alone takes that of one: the
backward gathers it again, but brings it over no link.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Set

import numpy as np
import numpy.typing as npt

from .occupancy import occupied, standing
from .plan import Fetch, Gather, Kind, Plan
from .problem import StepProblem


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A graph by itself: a forward, or its backward."""

    problem: StepProblem
    plan: Plan
    members: Mapping[str, Set[Hashable]]
    """The parameters, or tiles, of each unit: units of both graphs may be other groups of them."""

    def free(self) -> npt.NDArray[np.float64]:
        """Return the bytes of the device that the plan leaves free in each region."""
        device = self.problem.device
        return self.problem.room(device) - occupied(self.problem, self.plan)[device][: self.problem.count].astype(np.float64)

    def begins_with(self) -> float:
        """Return the bytes of the device that its first region leaves free before anything moves."""
        problem, device = self.problem, self.problem.device
        stands = sum(count for tier, _, count in standing(problem, self.plan) if tier == device)
        return problem.room(device) - stands - problem.regions[0].workspace_bytes


def shards_between(forward: Side, backward: Side, *, between: int = 0) -> frozenset[str]:
    """Return the units of the backward whose shards stay from their last gather in the forward to their first one there.

    They take memory that both plans leave free: those that the backward uses first come first. `between`: bytes of the device
    that the caller's code takes behind the forward, before the backward begins.
    """
    ahead, back = forward.free(), backward.free()
    beside = backward.begins_with() - between
    left, fetches = _last_gathers(forward), _Fetches(backward)
    problem, found = backward.problem, set[str]()
    first: dict[str, Gather] = {}
    for row in sorted(backward.plan.shared.gathers, key=lambda row: row.due):
        first.setdefault(row.unit, row)
    for name, gather in first.items():
        fetch = fetches.of(gather)
        dues = [left.get(member) for member in backward.members.get(name, ())]
        if fetch is None or not dues or None in dues:
            continue
        size, begins, ends = problem.unit[name].stored_bytes, min(due for due in dues if due is not None) + 1, fetch.start
        if (ahead[begins:] >= size).all() and (back[:ends] >= size).all() and beside >= size:
            ahead[begins:] -= size
            back[:ends] -= size
            beside -= size
            found.add(name)
    return frozenset(found)


def _last_gathers(forward: Side) -> dict[Hashable, int]:
    """Return when the last gather of each parameter is due, of those that are brought for it."""
    fetches, found = _Fetches(forward), dict[Hashable, int]()
    for row in sorted(forward.plan.shared.gathers, key=lambda row: row.due):
        if fetches.of(row) is not None:
            found.update(dict.fromkeys(forward.members.get(row.unit, ()), row.due))
    return found


class _Fetches:
    """What brings the shards that gathers take."""

    def __init__(self, side: Side) -> None:
        self._rows: dict[str, list[Fetch]] = {}
        for row in side.plan.local.fetches:
            if row.kind is Kind.PARAM and row.to == side.problem.device:
                self._rows.setdefault(row.name, []).append(row)

    def of(self, gather: Gather) -> Fetch | None:
        """Return the fetch of a gather; None where the shard lives on the device."""
        return next((row for row in self._rows.get(gather.unit, ()) if row.serves(gather)), None)


__all__ = ["Side", "shards_between"]
