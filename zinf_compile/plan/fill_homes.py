"""Homes for one parameter after the other: what there is room for lives near, the rest as far away as is allowed.

`backend/home_planner` calls it with its own account of memory, which is the one that caps are kept by. All pieces of a unit's
states have one home. The choices follow from the problem without its budgets: a larger budget adds some and takes none away.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence

from zinf_compile.ir.tiers import Tier

from .plan import Homes
from .planners._build import farthest
from .planners._expected import Expected
from .planners._homes import least_seconds
from .problem import StepProblem

KINDS = ("params", "grads", "states")
RUNGS = 64
"""Steps from nothing near to everything, where there are more things than that."""
SMALL_PART = 64
"""Small units have at most one byte for so many of the largest unit's, and together at most half of a rung."""

Item = tuple[str, str, int]
"""A field of `Homes`, the unit, and bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Excess:
    """Bytes by which homes exceed what the device, and the host, may hold; negative where they don't."""

    device: int
    host: int = 0

    @property
    def fits(self) -> bool:
        """Whether both are within their caps."""
        return self.device <= 0 and self.host <= 0

    @property
    def lacking(self) -> int:
        """Bytes that are missing."""
        return max(0, self.device) + max(0, self.host)


Check = Callable[[Homes], Excess]


def no_bound(homes: Homes) -> Excess:
    """Bound nothing: any homes may fit."""
    return Excess(-sys.maxsize, -sys.maxsize)


@dataclasses.dataclass(frozen=True, slots=True)
class Filled:
    """Homes, and whether they fit: where none do, those that lack least."""

    homes: Homes
    excess: Excess


def fill_homes(problem: StepProblem, check: Check, *, at_least: Check = no_bound) -> Filled:
    """Return homes that fit, with which a step is expected to take least, and of these the ones that move least.

    Along each order of things, as many as fit live on the device, then as many on the host. The farthest homes are among the
    choices. Where none fits, those are returned for which the least memory is missing.

    `at_least`: no more than `check` says of the same homes, on either side, and never less for nearer ones: homes that can't fit
    by it, or lack more than others, are not checked. It changes no choice.
    """
    fits = _Fits(check, at_least)
    ladders = [_Ladder(problem, order) for order in orders(problem)]
    found: list[Homes] = []
    for ladder in ladders:
        if fits.excess(ladder, ladder.rungs, 0).fits:  # all that may is on the device
            return Filled(ladder.homes(ladder.rungs, 0), fits.excess(ladder, ladder.rungs, 0))
        chosen = _fill(ladder, fits)
        if chosen is not None:
            found.append(ladder.homes(*chosen))
    if found:
        expected = Expected(problem, None if problem.host != problem.device else _all_on_drives)
        best = min(found, key=lambda homes: (expected.seconds(homes), *least_seconds(problem, homes)))
        return Filled(best, check(best))
    return _least_lacking(ladders, fits)


def _all_on_drives(homes: Homes) -> bool:
    """Say whether nothing lives in memory: where the device is the host, only then do updates run beside the regions."""
    return not any(tier.in_memory for table in (homes.params, homes.grads, homes.states) for tier in table.values())


class _Fits:
    """What was asked of a check, and of its bound, so far."""

    def __init__(self, check: Check, at_least: Check) -> None:
        self._check, self._at_least = check, at_least
        self._known: dict[Hashable, Excess] = {}
        self._bounds: dict[Hashable, Excess] = {}

    def excess(self, ladder: _Ladder, near: int, middle: int) -> Excess:
        """Return what the homes of a rung exceed."""
        key = ladder.key(near, middle)
        if key not in self._known:
            self._known[key] = self._check(ladder.homes(near, middle))
        return self._known[key]

    def at_least(self, ladder: _Ladder, near: int, middle: int) -> Excess:
        """Return what they exceed at least."""
        key = ladder.key(near, middle)
        if key not in self._bounds:
            self._bounds[key] = self._at_least(ladder.homes(near, middle))
        return self._bounds[key]


def _least_lacking(ladders: Sequence[_Ladder], fits: _Fits) -> Filled:
    """Return the homes of all rungs for which the least memory is missing, the first of those that are equal in this."""
    best: tuple[int, _Ladder, tuple[int, int]] | None = None
    for ladder in ladders:
        for near, middle in ladder.all():
            if best is not None and middle == 0 and fits.at_least(ladder, near, 0).device >= best[0]:
                break  # as those with more on the device do
            if best is not None and fits.at_least(ladder, near, middle).lacking >= best[0]:
                continue
            lacking = fits.excess(ladder, near, middle).lacking
            if best is None or lacking < best[0]:
                best = lacking, ladder, (near, middle)
    assert best is not None, "each ladder has the farthest homes"
    _, ladder, rung = best
    return Filled(ladder.homes(*rung), fits.excess(ladder, *rung))


def _fill(ladder: _Ladder, fits: _Fits) -> tuple[int, int] | None:
    """Return the rungs of device and host that fit, as high as possible; None where none do."""

    def middle_of(near: int) -> int | None:
        if not ladder.has_middle:
            return 0 if fits.excess(ladder, near, 0).fits else None
        return _highest(
            ladder.rungs - near,
            lambda rung: fits.excess(ladder, near, rung).fits,
            may_fit=lambda rung: fits.at_least(ladder, near, rung).host <= 0,
        )

    def near_fits(near: int) -> bool:
        if fits.excess(ladder, near, 0).device > 0:
            return False
        return middle_of(near) is not None

    near = _highest(ladder.rungs, near_fits, may_fit=lambda near: fits.at_least(ladder, near, 0).device <= 0)
    if near is None:
        return None
    middle = middle_of(near)
    assert middle is not None, "it fits"
    return near, middle


def _highest(most: int, fits: Callable[[int], bool], *, may_fit: Callable[[int], bool]) -> int | None:
    """Return a number up to `most` that fits while the next one doesn't: 0 if that fits, else the highest that does.

    `may_fit` holds for each that fits, and where it doesn't hold it doesn't for any higher number.
    """
    if not may_fit(0):
        return None
    if fits(0):
        return _last(most, fits)
    return next((number for number in range(_last(most, may_fit), 0, -1) if fits(number)), None)


def _last(most: int, holds: Callable[[int], bool]) -> int:
    """Return a number up to `most` of which something holds, as it does of 0, while of the next one it doesn't."""
    low, high = 0, most + 1
    while high - low > 1:
        between = (low + high) // 2
        low, high = (between, high) if holds(between) else (low, between)
    return low


class _Ladder:
    """Homes with the first things of an order on the device, the next ones on the host, the others as far as is allowed."""

    def __init__(self, problem: StepProblem, order: Sequence[Item]) -> None:
        self._problem, self._far = problem, farthest(problem)
        self._order = order
        ends = list(itertools.accumulate((size for *_, size in order), initial=0))
        if len(order) <= RUNGS:
            self._ends = list(range(len(order) + 1))
        else:
            first = (0, 0.5) if problem.host != problem.device else (0,)  # half a rung: the small ones
            marks = [ends[-1] * rung / RUNGS for rung in (*first, *range(1, RUNGS + 1))]
            self._ends = [max(n for n, end in enumerate(ends) if end <= mark * (1 + 1e-9)) for mark in marks]
        self.rungs = len(self._ends) - 1
        self._device, *others = problem.tiers
        between = [tier for tier in others if tier.in_memory and tier != problem.tiers[-1]]
        self._host = between[0] if between else None
        self.has_middle = self._host is not None

    def key(self, near: int, middle: int) -> Hashable:
        """Return what is equal where the homes are."""
        return tuple(frozenset((kind, name) for kind, name, _ in part) for part in self._parts(near, middle))

    def all(self) -> Iterator[tuple[int, int]]:
        """Yield all rungs of the device, each with nothing, half and all of the rest on the host."""
        for near in range(self.rungs + 1):
            left = self.rungs - near if self.has_middle else 0
            for middle in sorted({0, left // 2, left}):
                yield near, middle

    def homes(self, near: int, middle: int) -> Homes:
        """Return the homes."""
        tables = {"params": dict(self._far.params), "grads": dict(self._far.grads), "states": dict(self._far.states)}
        for tier, part in zip((self._device, self._host), self._parts(near, middle), strict=True):
            for kind, name, _ in part:
                allowed: tuple[Tier, ...] = getattr(self._problem.allowed, kind)
                if tier is not None and (not allowed or tier in allowed):
                    pieces = [piece.name for piece in self._problem.pieces_of[name]] if kind == "states" else [name]
                    tables[kind].update(dict.fromkeys(pieces, tier))
        return Homes(params=tables["params"], grads=tables["grads"], states=tables["states"])

    def _parts(self, near: int, middle: int) -> tuple[Sequence[Item], Sequence[Item]]:
        first, second = self._ends[near], self._ends[min(self.rungs, near + middle)]
        return self._order[:first], self._order[first:second]


def orders(problem: StepProblem) -> list[list[Item]]:
    """Return orders in which things come nearer: kind by kind, and unit by unit with all that belongs to it.

    Small units come first, with all that belongs to them. Else units are in the order of their first uses: what is updated last
    is used first. What may live on one tier only has no choice.
    """
    small = _small_units(problem)
    units = sorted(problem.units, key=lambda unit: (unit.name not in small, min((*unit.uses, *unit.gradients))))
    allowed = {kind: getattr(problem.allowed, kind) for kind in KINDS}
    free = [kind for kind in KINDS if len(allowed[kind] or problem.tiers) > 1]
    items: dict[str, list[Item]] = {
        "params": [("params", unit.name, unit.stored_bytes) for unit in units if len(problem.param_tiers(unit.name)) > 1],
        "grads": [("grads", unit.name, unit.gradient_bytes) for unit in units if unit.trained],
        "states": [
            ("states", unit.name, sum(piece.state_bytes for piece in problem.pieces_of[unit.name]))
            for unit in units
            if problem.pieces_of[unit.name]
        ],
    }

    def in_order(*kinds: str) -> list[Item]:
        found = [item for kind in kinds if kind in free for item in items[kind]]
        return sorted(found, key=lambda item: item[1] not in small)

    by_kind, last = in_order("params", "grads", "states"), in_order("grads", "states", "params")
    place = {unit.name: number for number, unit in enumerate(units)}
    bundles = sorted(by_kind, key=lambda item: place[item[1]])
    return [by_kind, bundles, last, in_order("states", "grads", "params")]


def _small_units(problem: StepProblem) -> set[str]:
    """Return the units that take next to no room, each and together, but a transfer each; none where the device is the host.

    There a step that keeps nothing in memory updates beside the regions, and what is small is read together.
    """
    if problem.host == problem.device:
        return set()
    sizes = sorted((unit.stored_bytes, unit.name) for unit in problem.units)
    largest, room = sizes[-1][0] if sizes else 0, sum(size for size, _ in sizes) / (2 * RUNGS)
    sums = itertools.accumulate(size for size, _ in sizes)
    return {name for (size, name), held in zip(sizes, sums, strict=True) if size * SMALL_PART <= largest and held <= room}


__all__ = ["Excess", "Filled", "fill_homes", "orders"]
