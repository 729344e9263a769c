"""The default: what is used again soonest stays, the next missing is fetched first, as early as memory allows.

Homes are chosen before that, among those of a ladder that follows from the problem without its budgets: the choices that move
least over the busiest link are planned first, until no other one can be faster; then some near the best of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from zinf_compile.errors import BudgetError
from zinf_compile.ir.sizes import CHUNK_BUFFERS
from zinf_compile.plan.plan import Homes, Kind, Plan
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import KEEP, RECOMPUTE
from zinf_compile.plan.simulate import simulate, step_seconds
from zinf_compile.plan.unroll import COMPUTE, UPDATE

from ._build import Stay, ahead_by, at_step, build, farthest, nearest, shortage
from ._expected import Expected
from ._from_walk import moved_by
from ._gaps import Gaps, away, find_gaps
from ._homes import choices, fits
from ._near_homes import climb, near_homes
from ._residency import best_walk
from ._start_early import as_early
from ._updates import deferred
from .just_in_time import just_in_time
from .largest_first import largest_first

NAME = "cached_prefetch"
FAR, NEAR = (64, 16), (4, 1)
"""Regions in which a gradient has left the device: of all of `FAR` and the most of `NEAR` that fit, a walk says which is best."""
WORTH = 1.002
"""What homes near the best ones must gain so that others near these are tried."""
ROUNDS = 3
"""Walks, each with less room, until one's plan fits: what passes the host has memory there a little longer than they count."""
GAIN = 1.01
"""What more regions must gain: until a gradient has left, its memory is not there for what stays or comes early."""
AT_FIRST_LOSS = 1.02
"""What few transfers before the first region may cost: by the problem, links serve what was issued first, even if it is late."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How many choices are tried."""

    rungs: int
    """Of rooms on the device for what stays between uses."""
    reserves: tuple[float, ...]
    """Of these rooms, in largest units: left for what is on its way."""
    home_rungs: int
    plans: int
    """Choices of homes that are planned at most, the most promising first."""
    by_sums: int = 0
    """Further ones, those first that move least over the busiest link."""
    halvings: int = 0
    """Further rooms, each half of the one above: of many large units a small part only fits."""
    far: bool = False
    """Whether saved values leave for the farthest tier in further plans, where they fit on the nearest as well."""
    climbs: int = 0
    """Choices of the ladder from which a climb begins."""
    near: int = 0
    """Further choices that are planned at most: near the best one of these, and again near the best one behind climbs."""
    walks: int | None = None
    """Rungs that are walked at most, from the one with most memory on; None: all."""
    largest: bool = False
    """Whether the plan that keeps the largest units is tried as well: over a slow link what counts is bytes, not when they are
    used."""
    done: tuple[float, ...] = (0.0,)
    """Boundaries, in steps, until which deferred updates may still write; 0: their last due."""


def effort_for(problem: StepProblem) -> Effort:
    """Return the effort that keeps planning within seconds."""
    size = problem.count + len(problem.units) + len(problem.pieces) + len(problem.saved)
    if not problem.pieces:
        few = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
        if size < 40:
            return Effort(48, few, 1, 1, largest=True)
        return Effort(24, (0.0, 0.5, 1.0, 1.5), 1, 1, largest=True) if size < 500 else Effort(8, (0.5, 1.0), 1, 1)
    if size < 100:
        return Effort(6, (0.0, 1.0), 8, 6, by_sums=12, largest=True, done=(0.0, 1.6, 2.0), far=True, climbs=3, near=24)
    if size < 500:
        return Effort(6, (0.0, 1.0), 8, 6, by_sums=4, largest=True, done=(0.0, 2.0), far=True, climbs=3, near=12)
    if size < 3000:
        return Effort(4, (1.0,), 8, 4, halvings=6)
    return Effort(4, (1.0,), 8, 3, halvings=6, walks=1)


def cached_prefetch(problem: StepProblem) -> Plan:
    """Return the fastest plan found; raise `BudgetError` where not even moving everything just in time fits."""
    search = _Search(problem, effort_for(problem))
    search.try_ladder()
    search.try_near(by_sums=True)
    search.try_climbs()
    search.try_near(by_sums=False)
    if search.best is None:
        try:
            return dataclasses.replace(just_in_time(problem), planner=NAME)
        except BudgetError as error:
            raise BudgetError(str(error).replace("'just_in_time'", repr(NAME))) from None
    if search.effort.largest:
        with contextlib.suppress(BudgetError):
            search.take(dataclasses.replace(largest_first(problem), planner=NAME))
    search.prefer_near()
    if not problem.pieces and all(unit.trained for unit in problem.units):  # transfers of graphs in a step
        search.start_early()
    return search.best[1]


class _Search:
    """The fastest plan found so far, and the homes that were planned."""

    def __init__(self, problem: StepProblem, effort: Effort) -> None:
        self.problem, self.effort = problem, effort
        self.best: tuple[float, Plan] | None = None
        self._seen: list[Homes] = []
        self._leaving = {value.name for value in problem.saved if value.choices and not {KEEP, RECOMPUTE} & {*value.choices}}
        self._expected = Expected(problem)
        self._choices = choices(problem, self._expected, rungs=effort.home_rungs)

    def take(self, plan: Plan) -> None:
        """Keep a plan if it is the fastest, and has leave what must."""
        if self._leaving - {row.name for row in plan.local.stores}:
            return
        seconds = step_seconds(self.problem, plan)
        if self.best is None or seconds < self.best[0] * (1 - 1e-9):
            self.best = seconds, plan

    def prefer_near(self) -> None:
        """Have everything as near as is allowed where all fits, and is faster or moves less: moves wear out drives."""
        homes = nearest(self.problem)
        if self.best is None or self.best[1].local.homes == homes or self._leaving or not fits(self.problem, homes):
            return
        for plan in _plans(self.problem, homes, self.effort):
            if any(store.kind is Kind.SAVED for store in plan.local.stores):
                continue
            seconds, best = step_seconds(self.problem, plan), self.best
            less = seconds == best[0] and _moving_seconds(self.problem, plan) < _moving_seconds(self.problem, best[1])
            if seconds < best[0] or less:
                self.best = seconds, plan

    def start_early(self) -> None:
        """Have transfers start as early as memory allows, and few before the first region."""
        assert self.best is not None, "there is a plan"
        seconds, plan = self.best
        early = as_early(self.problem, plan)
        if step_seconds(self.problem, early) <= seconds * AT_FIRST_LOSS:
            self.best = seconds, early

    def try_ladder(self) -> None:
        """Plan the most promising homes of the ladder that fit, and those that move least over the busiest link."""
        by_sums = sorted(self._choices, key=lambda choice: choice.by_sums)
        for ordered, most in ((by_sums, self.effort.by_sums), (self._choices, self.effort.plans)):
            planned = 0
            for choice in ordered:
                if planned == most:
                    break
                planned += self._try(choice.homes, choice.least)

    def try_climbs(self) -> None:
        """Plan homes reached from the most promising ones of the ladder, and from the farthest."""
        if not self.effort.climbs:
            return
        found = (choice.homes for choice in self._choices if self._fit_deferred(choice.homes))
        for start in [*itertools.islice(found, self.effort.climbs), farthest(self.problem)]:
            self._try(climb(self.problem, start, self._expected, self._fit_deferred))

    def try_near(self, *, by_sums: bool) -> None:
        """Plan homes near those of the best plan until then, with finer parts than those of the ladder."""
        left = self.effort.near
        for parts in (3 * self.effort.home_rungs, 6 * self.effort.home_rungs):
            gained = True
            while gained and left > 0 and self.best is not None:
                before, tried = self.best[0], 0
                homes = self.best[1].local.homes
                near = near_homes(self.problem, homes, self._expected, parts=parts, between=not by_sums)
                for choice in sorted(near, key=lambda choice: choice.by_sums) if by_sums else near:
                    if self.best[0] < before or tried == self.effort.near // 3:
                        break
                    tried += self._try(choice.homes, choice.least)
                left -= tried
                gained = self.best[0] * WORTH < before

    def _try(self, homes: Homes, least: float = 0.0) -> bool:
        """Plan homes that were not planned before, unless no plan can be faster with them; return whether any fits."""
        if homes in self._seen or (self.best is not None and least >= self.best[0] * (1 - 1e-9)):
            return False
        self._seen.append(homes)
        found = False
        for plan in _plans(self.problem, homes, self.effort):
            found = True
            self.take(plan)
        return found

    def _fit_deferred(self, homes: Homes) -> bool:
        """Say whether homes fit where updates are deferred and everything else moves just in time."""
        if not fits(self.problem, homes):
            return False
        way = _Way(self.problem, homes, _reaches(self.problem)[-1], 1, late=True, done=0.0)
        return _gaps(self.problem, homes, ahead_by(self.problem, homes, {}), way) is not None


def _moving_seconds(problem: StepProblem, plan: Plan) -> float:
    """Return the seconds for which links are busy in a step."""
    timeline = simulate(problem, plan)
    return sum(timeline.busy(lane) for lane in timeline.lanes if lane not in (COMPUTE, UPDATE))


def _plans(problem: StepProblem, homes: Homes, effort: Effort) -> Iterator[Plan]:
    """Yield plans with these homes: with all updates behind the last region, with deferred ones, and with late writes.

    Saved values leave for the nearest tier. Where that is not the farthest one, they leave for it in further plans, those of a
    smaller effort only where else nothing fits.
    """
    stays = ahead_by(problem, homes, {})
    reaches = _reaches(problem)
    several = any(away(problem, value) != away(problem, value, far=True) for value in problem.saved)
    for late, done in ((False, 0.0), *((True, done) for done in effort.done)) if problem.pieces else ((False, 0.0),):
        if _gaps(problem, homes, stays, _Way(problem, homes, reaches[-1], 1, late=late, done=done)) is None:
            continue  # nor do the others fit, which take more memory
        for far in (False, True) if several else (False,):
            found: list[tuple[float, Plan]] = []
            for reach in reaches:
                ways = (
                    _Way(problem, homes, reach, buffers, late=late, done=done, far_saved=far, waits=waits)
                    for waits in (False, True)
                    for buffers in range(CHUNK_BUFFERS, 0, -1)
                )
                walked = next(filter(None, (_walked(problem, homes, stays, way, effort) for way in ways)), None)
                if walked is not None:
                    found.append(walked)
                if found and reach[0] not in FAR:
                    break
            if found:
                near = found[-1]
                best = min(found, key=lambda row: row[0])
                yield best[1] if best[0] * GAIN < near[0] else near[1]
                if not effort.far:
                    break


def _walked(problem: StepProblem, homes: Homes, stays: Sequence[Stay], way: _Way, effort: Effort) -> tuple[float, Plan] | None:
    """Return the fastest plan of a way, and its seconds by the walk; None where nothing fits."""
    found = _gaps(problem, homes, stays, way)
    if found is None:
        return None
    rungs, reserves, halvings = effort.rungs, effort.reserves, effort.halvings
    for _ in range(ROUNDS if way.waits else 1):
        best = best_walk(found.walk, found.gaps, rungs=rungs, reserves=reserves, halvings=halvings, most=effort.walks)
        if best is None:
            return None
        plan = moved_by(problem, homes, best[0].moves, far_saved=way.far_saved).plan(problem, planner=NAME, **way.given)
        lacking = shortage(problem, plan)
        if not lacking:
            return best[0].seconds, plan
        if not found.walk.leave_out([lacking.get(tier, 0) for tier in problem.tiers if tier.in_memory]):
            return None
    return None


class _Way:
    """When updates run, and how long gradients and pieces of states may be on their way: what `build` is given of it."""

    def __init__(
        self,
        problem: StepProblem,
        homes: Homes,
        reach: tuple[int, int],
        buffers: int,
        *,
        late: bool,
        done: float,
        far_saved: bool = False,
        waits: bool = True,
    ) -> None:
        updates = deferred(problem, homes, buffers=buffers) if late else at_step(problem, homes)
        held, until = buffers if updates else 0, int(done * problem.count)
        self.far_saved, self.waits = far_saved, waits
        self.given: dict[str, Any] = {"updates": updates, "buffers": held, "reach": reach, "done": until}


def _gaps(problem: StepProblem, homes: Homes, stays: Sequence[Stay], way: _Way) -> Gaps | None:
    """Return the gaps of what may stay or leave; None where even with all of it gone there is not enough memory."""
    base = build(problem, homes, stays, planner=NAME, **way.given)
    found = find_gaps(problem, homes, base, far_saved=way.far_saved, waits=way.waits)
    return None if any((free < 0).any() for free in found.walk.free) else found


def _reaches(problem: StepProblem) -> list[tuple[int, int]]:
    """Return in how many regions gradients leave device and host, longest first.

    Behind a long queue of what is fetched ahead a gradient takes long, and compute waits if it is due soon; but until it is due
    its memory is taken.
    """
    count = problem.count
    far = [reach for reach in FAR if 4 * reach <= count]
    return list(dict.fromkeys([*((reach, count) for reach in (*far, *NEAR)), (1, 1)]))
