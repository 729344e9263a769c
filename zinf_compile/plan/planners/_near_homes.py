"""Homes that differ a little from others: a part of one kind of state lives nearer, and one of another farther away."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
    for tier in problem.tiers[:-1]:
        starts = [homes, *(_without(problem, homes, items, kind, tier, part) for kind in KINDS)]
        for start in filter(None, starts):
            for kind in KINDS:
                brought = _with(problem, start, items, kind, tier, part)
                if brought is not None and brought not in found and brought != homes:
                    found.append(brought)
    rated = [Choice(each, *least_seconds(problem, each)) for each in found if fits(problem, each)]
    return sorted(rated, key=lambda choice: (choice.least, choice.moved))


def _with(problem: StepProblem, homes: Homes, items: Sequence[Item], kind: str, tier: Tier, part: float) -> Homes | None:
    """Return homes with the first items of a kind that live farther away, about `part` bytes, on a tier; None: there are none."""
    table, taken, place = dict(getattr(homes, kind)), 0, problem.tiers.index
    for own, names, size in items:
        if own != kind or place(table[names[0]]) <= place(tier) or not may_live(problem, kind, names, tier):
            continue
        if taken and taken + size > part:
            break
        table.update(dict.fromkeys(names, tier))
        taken += size
    return dataclasses.replace(homes, **{kind: table}) if taken else None


def _without(problem: StepProblem, homes: Homes, items: Sequence[Item], kind: str, tier: Tier, part: float) -> Homes | None:
    """Return homes with the last items of a kind that live on a tier, about `part` bytes, as far away as they may."""
    table, taken, away = dict(getattr(homes, kind)), 0, getattr(farthest(problem), kind)
    for own, names, size in reversed(items):
        if own != kind or table[names[0]] != tier or away[names[0]] == tier:
            continue
        if taken and taken + size > part:
            break
        table.update((name, away[name]) for name in names)
        taken += size
    return dataclasses.replace(homes, **{kind: table}) if taken else None
