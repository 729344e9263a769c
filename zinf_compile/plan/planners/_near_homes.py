"""Homes that differ a little from others: a part of one kind of state lives nearer, and one of another farther away."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.problem import StepProblem

from ._expected import Expected
from ._homes import Choice, Item, by_kind, fits, may_live, rated

KINDS = ("params", "grads", "states")
"""Fields of `Homes`."""
PARTS = (9, 18, 36, 72)
"""How many parts all bytes are, from the coarsest steps of a climb to the finest."""
BETTER = 0.998
"""The part of the seconds below which a step of a climb counts."""


def near_homes(problem: StepProblem, homes: Homes, expected: Expected, *, parts: int, between: bool = True) -> list[Choice]:
    """Return homes in which one kind comes nearer by one part, and another one goes away by one or does not.

    `parts`: how many of them all bytes are; `between`: what goes away may do so to any farther tier, not to the farthest alone.
    The most promising come first.
    """
    items = [item for kind in by_kind(problem) for item in kind]
    part = sum(size for _, _, size in items) / parts
    found: list[Homes] = []
    place = problem.tiers.index

    def sent(kind: str, near: Tier, far: Tier) -> Homes | None:
        """Return the homes with the last items of a kind that live on one tier on a farther one."""

        def to(names: Sequence[str], now: Tier) -> Tier:
            return far if now == near and may_live(problem, kind, names, far) else now

        return _moved(homes, items[::-1], kind, part, to)

    def brought(start: Homes, kind: str, tier: Tier) -> Homes | None:
        """Return homes with the first items of a kind that live farther away on the tier."""

        def to(names: Sequence[str], now: Tier) -> Tier:
            return tier if place(now) > place(tier) and may_live(problem, kind, names, tier) else now

        return _moved(start, items, kind, part, to)

    for tier in problem.tiers[:-1]:
        farther = problem.tiers[place(tier) + 1 :]
        away = (sent(kind, tier, far) for kind in KINDS for far in (farther if between else farther[-1:]))
        for start in filter(None, [homes, *away]):
            for new in filter(None, (brought(start, kind, tier) for kind in KINDS)):
                if new not in found and new != homes:
                    found.append(new)
    return rated(problem, [each for each in found if fits(problem, each)], expected)


def climb(problem: StepProblem, homes: Homes, expected: Expected, works: Callable[[Homes], bool]) -> Homes:
    """Return homes reached by steps to near ones that work, each to the most promising, as long as that is expected to gain."""
    seconds = expected.seconds(homes)
    for parts in PARTS:
        while True:
            near = near_homes(problem, homes, expected, parts=parts)
            better = (choice for choice in near if choice.expected < seconds * BETTER)
            step = next((choice for choice in better if works(choice.homes)), None)
            if step is None:
                break
            homes, seconds = step.homes, step.expected
    return homes


def _moved(
    homes: Homes, items: Sequence[Item], kind: str, part: float, to: Callable[[Sequence[str], Tier], Tier]
) -> Homes | None:
    """Return homes in which the first items of a kind that move, about `part` bytes, have done so; None where none does.

    `to`: the tier to which an item moves, given its names and where it is.
    """
    table, taken = dict(getattr(homes, kind)), 0
    for own, names, size in items:
        if own != kind or (new := to(names, table[names[0]])) == table[names[0]]:
            continue
        if taken and taken + size > part:
            break
        table.update(dict.fromkeys(names, new))
        taken += size
    return dataclasses.replace(homes, **{kind: table}) if taken else None
