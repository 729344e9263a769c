"""The linear programme behind `lower_bound`: intervals of a step, rows, and what links can move in them."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from zinf_compile.ir.tiers import Tier

from .problem import StepProblem
from .problem_parts import Link

WINDOWS = 16
"""Moments until which updates are looked at."""


class Rows:
    """Inequalities `sum(coefficient * variable) <= limit`, added up one by one."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.limit: list[float] = []

    def add(self, terms: dict[int, float], limit: float) -> None:
        number = len(self.limit)
        for column, value in terms.items():
            self.row.append(number)
            self.column.append(column)
            self.value.append(value)
        self.limit.append(limit)


class Programme:
    """Intervals alternate: 2 i + 1 is a checked region, 2 i everything from the checked region before it until it begins."""

    def __init__(self, problem: StepProblem, cells: int) -> None:
        self.problem = problem
        self.rows = Rows()
        self.upper: list[float] = []
        self.again: dict[int, float] = defaultdict(float)
        """Seconds of what the device computes beside its regions: it updates, and makes values again."""
        self.checked = self._choose(cells)
        self.intervals = 2 * len(self.checked)
        self.constant = problem.compute_seconds
        self.unit = self.constant or 1.0
        """Seconds that pauses are counted in, so that the solver is as precise where steps take microseconds."""
        self.fixed = [0.0] * self.intervals
        self.amount = float(sum(unit.stored_bytes + unit.full_bytes + unit.gradient_bytes for unit in problem.units))
        self.amount += sum(piece.state_bytes for piece in problem.pieces) or 1.0
        """Bytes that variables of bytes are counted in: shares and bytes side by side are more than the solver's precision."""
        self.of_region = self._intervals_of_regions()
        self.pauses = [self.variable() for _ in self.checked]
        """Of intervals 0, 2, ...: how long compute waits there or does what is in no region, in `unit`."""
        self.used_room: list[dict[int, float]] = [defaultdict(float) for _ in range(self.intervals)]
        self.lasting_room: list[dict[int, float]] = [defaultdict(float) for _ in range(self.intervals)]
        """What is on the device from an interval on until the step ends."""
        self.taken = [0.0] * self.intervals
        self.standing: dict[Tier, dict[int, float]] = {tier: defaultdict(float) for tier in problem.tiers}
        self.buffers: list[dict[int, float]] = []
        """Bytes of the host of which only the largest count, beside what stands there."""
        self.updates_due: list[tuple[int, dict[int, float], float]] = []
        """The interval until which a piece has to be updated, from interval 0 on, its terms, and the seconds of the host."""
        self.on_link: dict[str, list[dict[int, float]]] = {
            link.name: [defaultdict(float) for _ in range(self.intervals)] for link in problem.links
        }
        self.total: dict[str, dict[int, float]] = {link.name: defaultdict(float) for link in problem.links}
        self.least: dict[str, float] = defaultdict(float)
        self.homes: dict[str, dict[Tier, int]] = {}

    def variable(self, most: float = np.inf) -> int:
        """Add a variable between 0 and `most`."""
        self.upper.append(most)
        return len(self.upper) - 1

    def _choose(self, cells: int) -> list[int]:
        items = len({(unit.uses, unit.trained) for unit in self.problem.units}) + len(self.problem.saved)
        most = max(4, int(cells / max(1, 2 * items)))
        count = self.problem.count
        step = -(-count // most)
        while step > 1 and items * 2 * (count // step) > 4 * cells:
            step += 1
        return list(range(0, count, step))

    def _intervals_of_regions(self) -> list[int]:
        found, at = [], 0
        for region in range(self.problem.count):
            if at < len(self.checked) and self.checked[at] == region:
                found.append(2 * at + 1)
                at += 1
            else:
                found.append(2 * at % self.intervals)
        for region, interval in enumerate(found):
            self.fixed[interval] += self.problem.regions[region].seconds
        return found

    def home(self, name: str, allowed: tuple[Tier, ...], held: dict[Tier, float]) -> dict[Tier, int]:
        """Add shares of a home for each tier that is allowed, and the bytes that they take there during the step."""
        tiers = self.problem.tiers
        shares = {tier: self.variable(1.0 if not allowed or tier in allowed else 0.0) for tier in tiers}
        self.rows.add(dict.fromkeys(shares.values(), -1.0), -1.0)
        for tier in tiers:
            if held.get(tier, 0.0):
                self.standing[tier][shares[tier]] += held[tier]
        self.homes[name] = shares
        return shares

    def add_limits(self) -> None:
        problem = self.problem
        self.rows.add({**self.again, **dict.fromkeys(self.pauses, -self.unit)}, 0.0)
        if math.isfinite(room := problem.room(problem.device)):
            lasting: dict[int, float] = {}
            for interval, added in enumerate(self.lasting_room):
                if added:
                    here = self.variable()
                    self.rows.add({here: -self.amount, **lasting, **added}, 0.0)
                    lasting = {here: self.amount}
                self.rows.add({**self.used_room[interval], **lasting}, room - self.taken[interval])
        for tier, held in self.standing.items():
            if math.isfinite(problem.room(tier)):
                self.rows.add(dict(held), problem.room(tier))
        if self.buffers and math.isfinite(problem.room(problem.host)):
            largest = self.variable()
            for buffer in self.buffers:
                self.rows.add({**buffer, largest: -self.amount}, 0.0)
            self.rows.add({**self.standing[problem.host], largest: self.amount}, problem.room(problem.host))
        self._limit_updates()
        combined = link_weights(problem)
        if "update" in self.total:
            combined.append({"update": 1.0})
        for weights in combined:
            self._limit(weights)

    def _limit_updates(self) -> None:
        """What has to be updated until an interval is updated within the seconds until then."""
        ends = sorted({until for until, _, _ in self.updates_due})
        for end in ends[:: max(1, len(ends) // WINDOWS)]:
            terms: dict[int, float] = defaultdict(float)
            allowed = 0.0
            for until, own, seconds in self.updates_due:
                if until <= end:
                    allowed -= seconds
                    for column, value in own.items():
                        terms[column] += value
            for interval in range(end + 1):
                allowed += self._within(interval, terms)
            self.rows.add(dict(terms), allowed)

    def _within(self, interval: int, terms: dict[int, float]) -> float:
        """Take the seconds of an interval off the terms of a row, its pause, and return those that are fixed."""
        if not interval % 2:
            terms[self.pauses[interval // 2]] -= self.unit
        return self.fixed[interval]

    def _limit(self, weights: dict[str, float]) -> None:
        """No more passes in any interval than its seconds allow, and what has no interval passes in what is left."""
        over_all: dict[int, float] = defaultdict(float)
        constant = 0.0
        for name, weight in weights.items():
            constant += weight * self.least[name]
            for column, value in self.total[name].items():
                over_all[column] += weight * value
        for interval in range(self.intervals):
            terms: dict[int, float] = defaultdict(float)
            for name, weight in weights.items():
                for column, value in (self.on_link[name][interval] if self.on_link[name] else {}).items():
                    terms[column] += weight * value
                    over_all[column] += weight * value
            if terms:
                limit = self._within(interval, terms)
                self.rows.add(dict(terms), limit)
        if over_all or constant:
            for pause in self.pauses:
                over_all[pause] -= self.unit
            self.rows.add(dict(over_all), self.constant - constant)


def seconds_of(link: Link, count: float, units: int) -> float:
    """Return the time of the bytes of so many units, which move one by one."""
    return units * link.latency_seconds + count * link.sharers / link.bytes_per_second if count else 0.0


def link_weights(problem: StepProblem) -> list[dict[str, float]]:
    """Return weights of links that share time: the seconds that each would take alone, times these, fit into it."""
    lanes: dict[str, list[str]] = defaultdict(list)
    for link in problem.links:
        lanes[link.on_lane].append(link.name)
    return [dict.fromkeys(names, 1.0) for names in lanes.values()] + _pairs(problem)


def _pairs(problem: StepProblem) -> list[dict[str, float]]:
    """Return weights of two links that slow each other down: the seconds that each would take alone, times these, fit into time.

    With slowdowns a and b both move 1/a and 1/b of what they move alone. The weights are those of the lines from there to the
    points at which one link is idle; 1 where both take turns as well.
    """
    slow = {
        (link.name, each.link): link.bytes_per_second / each.bytes_per_second for link in problem.links for each in link.beside
    }
    found = []
    for one, other in {tuple(sorted(pair)) for pair in slow}:
        a, b = slow.get((one, other), 1.0), slow.get((other, one), 1.0)
        found.append({one: 1.0, other: min(1.0, b * (1 - 1 / a))})
        found.append({other: 1.0, one: min(1.0, a * (1 - 1 / b))})
    return found
