"""Choices of homes: from everything far away to everything near, a kind of state or a unit after the other.

The choices follow from the problem without its budgets, so that a larger budget adds some and takes none away.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.update_traffic import update_traffic

from ._build import farthest, update_tier
from ._expected import Expected

Item = tuple[str, tuple[str, ...], int]
"""A field of `Homes`, the names under it that move together, and their bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Homes, and the seconds below which no step with them can be."""

    homes: Homes
    expected: float
    """Seconds that a step with them is expected to take."""
    least: float
    moved: float
    """Seconds of all links together."""

    @property
    def by_sums(self) -> tuple[float, float]:
        """Return what orders choices by the sums over a whole step alone."""
        return self.least, self.moved


def choices(problem: StepProblem, expected: Expected, *, rungs: int) -> list[Choice]:
    """Return choices of homes that fit by themselves, the most promising first."""
    found: dict[tuple[object, ...], Homes] = {}
    nearer = [tier for tier in problem.tiers if tier.in_memory and tier != problem.tiers[-1]]
    for order in _orders(problem):
        for homes in _filled(problem, farthest(problem), order, nearer, rungs):
            found.setdefault(_key(homes), homes)
    return rated(problem, [homes for homes in found.values() if fits(problem, homes)], expected)


def rated(problem: StepProblem, found: Iterable[Homes], expected: Expected) -> list[Choice]:
    """Return choices of homes, the most promising first."""
    choices = [Choice(homes, expected.seconds(homes), *least_seconds(problem, homes)) for homes in found]
    return sorted(choices, key=lambda choice: (choice.expected, choice.least, choice.moved))


def _key(homes: Homes) -> tuple[object, ...]:
    return (*homes.params.values(), *homes.grads.values(), *homes.states.values())


def by_kind(problem: StepProblem) -> tuple[list[Item], list[Item], list[Item]]:
    """Return parameters, gradients and states in the order of their units' first uses: what is updated last is used first."""
    units = sorted(problem.units, key=lambda unit: min((*unit.uses, *unit.gradients)))
    groups = _groups(problem)
    place = {unit.name: number for number, unit in enumerate(units)}
    pieces = sorted(problem.pieces, key=lambda piece: min(place[name] for name in piece.units))
    by_group: dict[str, list[str]] = defaultdict(list)
    for unit in units:
        by_group[groups[unit.name]].append(unit.name)
    sizes = problem.unit
    params: list[Item] = [("params", tuple(g), sum(sizes[name].stored_bytes for name in g)) for g in by_group.values()]
    trained = [[name for name in g if sizes[name].trained] for g in by_group.values()]
    grads: list[Item] = [("grads", tuple(g), sum(sizes[name].gradient_bytes for name in g)) for g in trained if g]
    return params, grads, [("states", (piece.name,), piece.state_bytes) for piece in pieces]


def _orders(problem: StepProblem) -> list[list[Item]]:
    """Return orders in which things come nearer: kind by kind, and unit by unit with all that belongs to it."""
    params, grads, states = by_kind(problem)
    if not problem.pieces:
        return [params]
    groups = _groups(problem)
    owned: dict[str, list[Item]] = {groups[names[0]]: [] for _, names, _ in params}
    for item in (*params, *grads, *states):
        name = item[1][0]
        owned[groups[problem.piece[name].units[0] if item[0] == "states" else name]].append(item)
    bundles = [item for items in owned.values() for item in items]
    return [[*params, *grads, *states], bundles, [*grads, *states, *params]]


def _groups(problem: StepProblem) -> dict[str, str]:
    """Return for each unit the first of those that a piece joins it with: they have one home."""
    found = {unit.name: unit.name for unit in problem.units}
    for piece in problem.pieces:
        first = found[piece.units[0]]
        for name in piece.units[1:]:
            if found[name] != first:
                old = found[name]
                found = {unit: first if group == old else group for unit, group in found.items()}
    return found


def _filled(problem: StepProblem, start: Homes, order: Sequence[Item], tiers: Sequence[Tier], rungs: int) -> Iterator[Homes]:
    """Yield homes with the first items on the device, the next ones on the host, for all rungs of both."""
    total = sum(size for _, _, size in order)
    device, rest = tiers[0] if tiers else None, tiers[1:]
    if device is None:
        yield start
        return
    for rung in range(rungs + 1):
        homes, left = _bring(problem, start, order, device, total * rung / rungs)
        if not rest:
            yield homes
            continue
        farther = problem.tiers[-1] != rest[0]
        beyond = sum(size for _, _, size in left)
        for other in range(rungs + 1) if farther else (rungs,):
            yield _bring(problem, homes, left, rest[0], beyond * other / rungs)[0]


def _bring(problem: StepProblem, homes: Homes, order: Sequence[Item], tier: Tier, limit: float) -> tuple[Homes, list[Item]]:
    """Return homes with the first items that fit into the limit on a tier, and the other items."""
    tables = {"params": dict(homes.params), "grads": dict(homes.grads), "states": dict(homes.states)}
    left, taken = [], 0
    for kind, names, size in order:
        if taken + size <= limit * (1 + 1e-9) and may_live(problem, kind, names, tier):
            tables[kind].update(dict.fromkeys(names, tier))
            taken += size
        else:
            left.append((kind, names, size))
    return Homes(params=tables["params"], grads=tables["grads"], states=tables["states"]), left


def may_live(problem: StepProblem, kind: str, names: Sequence[str], tier: Tier) -> bool:
    """Say whether all of these parameters, gradients or states may live on a tier."""
    tiers = [problem.param_tiers(name) for name in names] if kind == "params" else [getattr(problem.allowed, kind)]
    return all(not allowed or tier in allowed for allowed in tiers)


def held_bytes(problem: StepProblem, homes: Homes) -> dict[Tier, int]:
    """Return the bytes of parameters, gradients and states that live on each tier; 0 for any other."""
    held: dict[Tier, int] = defaultdict(int)
    for unit in problem.units:
        held[homes.params[unit.name]] += unit.stored_bytes
        if unit.trained:
            held[homes.grads[unit.name]] += unit.gradient_bytes
    for piece in problem.pieces:
        held[homes.states[piece.name]] += piece.state_bytes
    return held


def fits(problem: StepProblem, homes: Homes) -> bool:
    """Say whether what lives on each tier fits there."""
    return all(count <= problem.room(tier) for tier, count in held_bytes(problem, homes).items())


def least_seconds(
    problem: StepProblem, homes: Homes, *, beside: Mapping[str, float] = MappingProxyType({}), again: float = 0.0
) -> tuple[float, float]:
    """Return the seconds of the busiest lane, of what the homes make each step move at least, and those of all links.

    `beside`: seconds by lane of what moves beside; `again`: of compute that runs a second time. Where the device is the host, its
    threads' updates count as compute: no choice looks better because more of its states are on a drive.
    """
    lanes: dict[str, float] = defaultdict(float, beside)
    compute, host = problem.compute_seconds + again, 0.0
    for unit in problem.units:
        if unit.trained:
            for link in problem.hops(homes.params[unit.name], problem.device):
                lanes[link.on_lane] += link.seconds(unit.stored_bytes)
            for link in problem.hops(problem.device, homes.grads[unit.name]):
                lanes[link.on_lane] += link.seconds(unit.gradient_bytes) * len(unit.gradients)
    for piece in problem.pieces:
        on = update_tier(problem, homes.states[piece.name])
        traffic = update_traffic(problem, homes, piece, on)
        for link, count in (*traffic.reads, *traffic.writes):
            lanes[link.on_lane] += link.seconds(count)
        if on == problem.device:
            compute += traffic.seconds
        else:
            host += traffic.seconds
    return max(compute, host, *lanes.values(), 0.0), sum(lanes.values())
