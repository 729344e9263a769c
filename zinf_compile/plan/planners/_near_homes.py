"""Homes that differ a little from others: a part of one kind of state lives nearer, and one of another farther away."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.problem import StepProblem

from ._build import farthest
from ._homes import Choice, Item, by_kind, fits, least_seconds, may_live

KINDS = ("params", "grads", "states")
"""Fields of `Homes`."""


def near_homes(problem: StepProblem, homes: Homes, *, parts: int) -> list[Choice]:
    """Return homes in which one kind comes nearer by one part, and another one goes away by one or does not.

    `parts`: how many of them all bytes are. Those that move least come first.
    """
    items = [item for kind in by_kind(problem) for item in kind]
    part = sum(size for _, _, size in items) / parts
    found: list[Homes] = []
    place, away = problem.tiers.index, farthest(problem)

    def sent(kind: str, tier: Tier) -> Homes | None:
        """Return the homes with the last items of a kind that live on the tier as far away as they may."""
        far = getattr(away, kind)
        return _moved(homes, items[::-1], kind, part, lambda names, now: far[names[0]] if now == tier else now)

    def brought(start: Homes, kind: str, tier: Tier) -> Homes | None:
        """Return homes with the first items of a kind that live farther away on the tier."""

        def to(names: Sequence[str], now: Tier) -> Tier:
            return tier if place(now) > place(tier) and may_live(problem, kind, names, tier) else now

        return _moved(start, items, kind, part, to)

    for tier in problem.tiers[:-1]:
        for start in filter(None, [homes, *(sent(kind, tier) for kind in KINDS)]):
            for new in filter(None, (brought(start, kind, tier) for kind in KINDS)):
                if new not in found and new != homes:
                    found.append(new)
    rated = [Choice(each, *least_seconds(problem, each)) for each in found if fits(problem, each)]
    return sorted(rated, key=lambda choice: (choice.least, choice.moved))


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
