"""A bound below which no plan brings the seconds of a step: a linear programme, solved by HiGHS.

Note: why it is a bound
    Everything may be cut into any parts here, and kept, moved and brought back in any order. Rooms are checked at the beginning
    and the end of regions, what is used in a region is there, and no link moves more in a region, or in the pause before one,
    than its rate allows. A unit has all its memory from its start on, so nothing of it is there while a region leaves no room
    for it. Each plan that repeats is a solution of the programme: its shares of bytes and its pauses, averaged over steps. What
    the programme leaves out (orders, whole units, the dues of updates) can only make a step longer. What is updated beside a
    step may be handed to its first use: then no drive has to bring it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array

from zinf_compile.errors import BudgetError, PlanError
from zinf_compile.ir.tiers import Tier

from .bound_gradients import GradientsProgramme
from .bound_programme import seconds_of
from .problem import StepProblem
from .problem_parts import KEEP, RECOMPUTE, Link, SavedValue, Unit
from .unroll import COMPUTE

CELLS = 60_000
"""Values over time in a programme; larger problems are checked at some regions only, which can only lower the bound of all."""

IDLE = 1e-4
"""What a second of a link costs beside one of the step, where links are to be idle if they can."""

TIE = 1e-3
"""Shares of the step that differ by less are equal."""

BUSY_CELLS = 15_000
"""As `CELLS`, for a solution in which links are idle if they can: that takes several times as long to find."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """The bound, and what sets it."""

    seconds: float
    busy: dict[str, float]
    """Share of the step for which each lane is busy in the solution; `compute` too. Links of one lane take turns."""

    @property
    def by(self) -> str:
        """Return the name of the busiest: compute where a link is no busier."""
        return max(self.busy, key=lambda name: self.busy[name] + (TIE if name == COMPUTE else 0.0))


def lower_bound(problem: StepProblem, *, cells: int = CELLS, idle_links: bool = False) -> Bound:
    """Return seconds that no plan's step can be shorter than; raise `BudgetError` where none fits.

    `idle_links`: `busy` is that of a second solution, at fewer moments in a large problem, in which links move little that they
    need not. Without it they may.
    """
    programme = _Programme(problem, cells)
    bound = programme.solve()
    if not idle_links:
        return bound
    smaller = programme if cells <= BUSY_CELLS else _Programme(problem, BUSY_CELLS)
    return Bound(bound.seconds, smaller.solve(idle=IDLE).busy)


class _Programme(GradientsProgramme):
    def __init__(self, problem: StepProblem, cells: int) -> None:
        """Write all rows."""
        super().__init__(problem, cells)
        for place, region in enumerate(self.checked):
            for interval in (2 * place, 2 * place + 1):
                self.taken[interval] += self.problem.regions[region].workspace_bytes
        self.slack = self._beside_uses()
        for unit, count in self._classes():
            self._add_unit(unit, count)
        self._add_saved()
        self.add_gradients()
        self.add_updates()
        self.add_limits()

    def solve(self, *, idle: float = 0.0) -> Bound:
        """Return the solution where a second of a link costs `idle` beside one of the step."""
        costs = np.zeros(len(self.upper))
        costs[self.pauses] = self.unit
        flows = self._flows()
        for table in flows.values() if idle else ():
            for column, value in table.items():
                costs[column] += idle * value
        solution = self._minimize(costs)
        seconds = self.constant + self.unit * float(solution[self.pauses].sum())
        if not seconds:
            return Bound(0.0, {"compute": 0.0})
        again = float(sum(value * solution[column] for column, value in self.again.items()))
        busy = defaultdict(float, {"compute": (self.constant + again) / seconds})
        lanes = {link.name: link.on_lane for link in self.problem.links}
        for name, table in flows.items():
            moved = self.least[name] + sum(value * solution[column] for column, value in table.items())
            busy[lanes.get(name, name)] += float(moved) / seconds
        return Bound(seconds, dict(busy))

    def _minimize(self, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the variables at which the costs are least."""
        rows = self.rows
        matrix = coo_array((rows.value, (rows.row, rows.column)), shape=(len(rows.limit), len(self.upper))).tocsr()
        size = abs(matrix).max(axis=1).toarray().ravel()
        size[size == 0] = 1.0  # rows in seconds and rows in bytes are held to the same precision
        found = linprog(
            costs / self.unit,
            A_ub=matrix.multiply(1 / size[:, None]).tocsr(),
            b_ub=np.array(rows.limit) / size,
            bounds=np.array([(0.0, upper) for upper in self.upper]),
            method="highs",
        )
        if found.status == 2:
            raise BudgetError("no plan fits into the budgets, however things are cut; raise them")
        if found.status != 0:
            raise PlanError(f"HiGHS found no bound: {found.message}")
        solution: npt.NDArray[np.float64] = found.x
        return solution

    def _flows(self) -> dict[str, dict[int, float]]:
        """Return by link the seconds that it is busy for each variable."""
        found = {name: dict(table) for name, table in self.total.items()}
        for name, intervals in self.on_link.items():
            for column, value in (item for each in intervals for item in each.items()):
                found[name][column] = found[name].get(column, 0.0) + value
        return found

    def _classes(self) -> list[tuple[Unit, int]]:
        """Return units that nothing tells apart here as one, with the bytes of all."""
        same: dict[object, list[Unit]] = defaultdict(list)
        for unit in self.problem.units:
            places = tuple(dict.fromkeys(self.of_region[use] for use in unit.uses))
            kept = self.problem.pieces_of[unit.name]
            same[(places, unit.trained, unit.is_gathered, unit.name if kept else "")].append(unit)
        self.smallest = {units[0].name: min(unit.full_bytes or unit.stored_bytes for unit in units) for units in same.values()}
        return [(units[0], len(units)) if len(units) == 1 else (_joined(units), len(units)) for units in same.values()]

    def _beside_uses(self) -> list[float]:
        """Return what is left beside the units that are used, at the end of each interval."""
        room = self.problem.room(self.problem.device)
        used = [room - taken for taken in self.taken]
        for unit in self.problem.units:
            for use in unit.uses:
                interval = self.of_region[use]
                if interval % 2:
                    for end in (interval - 1, interval):
                        used[end] -= unit.full_bytes or unit.stored_bytes
        return used

    def _add_unit(self, unit: Unit, count: int) -> None:
        problem, device = self.problem, self.problem.device
        allowed, held = problem.param_tiers(unit.name), dict.fromkeys(problem.tiers, float(unit.stored_bytes))
        homes = self.home(f"param {unit.name}", allowed, held)
        at_home = homes[device]
        size = unit.full_bytes if unit.is_gathered else unit.stored_bytes
        if unit.is_gathered:
            self.lasting_room[0][at_home] += unit.stored_bytes
            link = problem.link(None, device) if problem.world_size > 1 else None
            self._pass_once(unit, homes, count, near=0)
        else:
            links = problem.hops(problem.tiers[1], device) if len(problem.tiers) > 1 else ()
            link = links[0] if links else None
            self._pass_once(unit, homes, count, near=1)
        wire = unit.wire_bytes if unit.is_gathered else unit.stored_bytes
        seconds = seconds_of(link, wire, count) if link else 0.0
        uses = {self.of_region[use] for use in unit.uses}
        lasting = None if not unit.trained else () if unit.is_gathered else (at_home,)
        from_drive = not unit.is_gathered and link is not None and not problem.tiers[1].in_memory
        handed = -1
        if from_drive and unit.uses and self._is_handed(unit):  # regions behind the last checked one are in interval 0
            handed = self.of_region[min(unit.uses)] or self.intervals - 1
        present = self._over_time(uses, size, link, seconds, one=self.smallest[unit.name], lasting=lasting, handed=handed)
        for column in present.values():
            if not unit.is_gathered:
                self.rows.add({at_home: 1.0, column: -1.0}, 0.0)

    def _is_handed(self, unit: Unit) -> bool:
        """Say whether an update beside the step's regions may hand a part of a shard to its first use."""
        return any(piece.deferrable for piece in self.problem.pieces_of[unit.name])

    def _over_time(
        self,
        uses: set[int],
        size: float,
        link: Link | None,
        seconds: float,
        *,
        one: float,
        lasting: tuple[int, ...] | None,
        handed: int = -1,
    ) -> dict[int, int]:
        """Add the share that is on the device at the end of each interval, and what arrives in it. Return the former.

        What is used in a checked region is there at its beginning and end; what is used elsewhere in an interval has been there,
        or has arrived, once. `one`: the bytes of a unit, which has its memory from its start on: where these do not fit beside
        what a region uses, nothing of it is there. `lasting`: the shares that last over the step; None: all of it. `handed`:
        the last interval in which an update may hand it over.
        """
        checked = {use for use in uses if use % 2}
        elsewhere = uses - checked
        present = {interval: self.variable(1.0) for interval in range(self.intervals)}
        for interval, column in present.items():
            self.used_room[interval][column] += size
            there = interval in checked or interval + 1 in checked
            if there:
                self.rows.add({column: -1.0}, -1.0)
            elif one > self.slack[interval]:
                self.upper[column] = 0.0
            before = present[(interval - 1) % self.intervals]
            terms = {column: 1.0}
            if interval or lasting is None:
                terms[before] = terms.get(before, 0.0) - 1.0
            else:
                terms |= dict.fromkeys(lasting, -1.0)
            if link is not None and interval not in checked:
                arriving = self.variable()
                self.on_link[link.name][interval][arriving] += seconds
                come = [arriving, *([self.variable(1.0)] if interval <= handed else [])]
                terms |= dict.fromkeys(come, -1.0)
                if interval in elsewhere:
                    self.rows.add({before: -1.0, **dict.fromkeys(come, -1.0)}, -1.0)
            elif interval in elsewhere and link is None:
                self.rows.add({before: -1.0}, -1.0)
            self.rows.add(terms, 0.0)
        return present

    def _pass_once(self, unit: Unit, homes: dict[Tier, int], count: int, *, near: int) -> None:
        """A shard passes each link from its home to tier number `near` at least once a step, unless it is handed over there."""
        tiers, handed = self.problem.tiers, self._is_handed(unit)
        for tier in tiers[near + 1 :]:
            for link in self.problem.hops(tier, tiers[near]):
                if not (handed and link.source is not None and not link.source.in_memory):
                    self.total[link.name][homes[tier]] += seconds_of(link, unit.stored_bytes, count)

    def _add_saved(self) -> None:
        problem = self.problem
        away = problem.tiers[1:]
        again: dict[tuple[int, ...], int] = {}
        for value in problem.saved:
            choices = value.choices
            offload = [tier for tier in away if not choices or tier in choices]
            remake = bool(value.remade_by) and (not choices or RECOMPUTE in choices)
            keep = not choices or KEEP in choices or not (offload or remake)
            self._add_value(value, bool(offload), remake, keep, again)

    def _add_value(self, value: SavedValue, offload: bool, remake: bool, keep: bool, again: dict[tuple[int, ...], int]) -> None:
        problem = self.problem
        made, uses = self.of_region[value.made_in], [self.of_region[use] for use in value.used_in]
        last = max(uses, default=made)
        there = {interval for interval in {made, *uses} if interval % 2}
        gone = self.variable(1.0 if offload else 0.0)
        remade = self.variable(1.0 if remake else 0.0)
        if remake:
            if value.remade_by not in again:
                again[value.remade_by] = whole = self.variable(1.0)
                seconds = sum(problem.regions[region].seconds for region in value.remade_by)
                self.again[whole] += seconds
            self.rows.add({remade: 1.0, again[value.remade_by]: -1.0}, 0.0)
        out = problem.hops(problem.device, problem.tiers[1])[0] if offload else None
        back = problem.hops(problem.tiers[1], problem.device)[0] if offload else None
        if out is not None:
            self.total[out.name][gone] += out.seconds(value.bytes)
        before: int | None = None
        for interval in range(made, last + 1):
            if interval in there or (interval + 1 in there and interval + 1 != made):
                column = self.variable(1.0)
                self.rows.add({column: -1.0}, -1.0)
            else:
                column = self.variable(1.0)
            if interval < last or interval % 2:
                self.used_room[interval][column] += value.bytes
            if before is not None and interval not in there:
                terms = {column: 1.0, before: -1.0, remade: -1.0}
                if back is not None:
                    arriving = self.variable()
                    self.on_link[back.name][interval][arriving] += back.seconds(value.bytes)
                    self.rows.add({arriving: 1.0, gone: -1.0}, 0.0)
                    terms[arriving] = -1.0
                self.rows.add(terms, 0.0)
                self.rows.add({column: -1.0, gone: -1.0, remade: -1.0}, -1.0)
            before = column
        if not keep:
            self.rows.add({gone: -1.0, remade: -1.0}, -1.0)


def _joined(units: list[Unit]) -> Unit:
    sizes = ("stored_bytes", "full_bytes", "wire_bytes", "gradient_bytes", "full_gradient_bytes", "reduced_bytes")
    total = {size: sum(getattr(unit, size) for unit in units) for size in sizes}
    return dataclasses.replace(units[0], **total)
