"""Refusals for lack of memory that all ranks raise together.

What ranks hold differs: shards are uneven, and one may keep more than another. A rank that refused alone would leave the others
waiting for it in the next transfer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from zinf_compile._torch import outside_tracing
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context

SIDES = (Tier.DEVICE, Tier.HOST)


@dataclasses.dataclass(frozen=True)
class Lack:
    """This rank's need for memory of the device, or of the host beside it, in bytes."""

    needed: int
    cap: int | None
    """None: there is none."""
    works: int
    """The smallest cap that works for this rank; 0 where it needs nothing."""
    text: str = ""
    """The beginning of a refusal, where this rank is short."""

    @property
    def short(self) -> bool:
        """Whether more is needed than is allowed."""
        return self.cap is not None and self.needed > self.cap


class Worst(NamedTuple):
    """Of all ranks, in bytes."""

    rank: int
    """One that is short, and needs most of those."""
    needed: int
    """By that rank."""
    works: int
    """The smallest cap that works for all ranks."""


def is_any_short(lacks: Mapping[Tier, Lack]) -> bool:
    """Return whether this rank is short."""
    return any(lack.short for lack in lacks.values())


def any_rank_short(context: Context, lacks: Mapping[Tier, Lack], *, what: str) -> bool:
    """Return whether any rank is short. Collective."""
    return any(_of_ranks(context, is_any_short(lacks), what))


def largest_of_ranks(context: Context, number: int, *, what: str) -> int:
    """Return the largest number of all ranks. Collective."""
    return int(max(_of_ranks(context, number, what)))


def least_of_ranks(context: Context, number: int, *, what: str) -> int:
    """Return the least number of all ranks. Collective."""
    return int(min(_of_ranks(context, number, what)))


def _of_ranks(context: Context, number: float, what: str) -> list[float]:
    with outside_tracing():
        return context.ranks.agree([what], what=what, value=float(number))


def worst_of_ranks(context: Context, lacks: Mapping[Tier, Lack]) -> dict[Tier, Worst]:
    """Return the sides on which a rank is short, and how much of them works for all. Collective."""
    mine = [lacks.get(side, Lack(0, None, 0)) for side in SIDES]
    figures = [float(figure) for lack in mine for figure in (lack.short, lack.needed, lack.works)]
    with outside_tracing():
        everyone = context.ranks.exchange(
            torch.tensor(figures, dtype=torch.float64), what="the memory that each rank needs"
        ).tolist()
    found = {}
    for number, side in enumerate(SIDES):
        rows = [row[3 * number : 3 * number + 3] for row in everyone]
        needs = {rank: int(needed) for rank, (short, needed, _) in enumerate(rows) if short}
        if needs:
            rank = max(needs, key=lambda rank: needs[rank])
            found[side] = Worst(rank, needs[rank], int(max(works for _, _, works in rows)))
    return found


def refusal_text(context: Context, lacks: Mapping[Tier, Lack], named: Callable[[Tier, int], str], *, what: str) -> str:
    """Return the text of a refusal on all ranks, of which one is short. Collective.

    `named(side, works)` names the cap that works; `what` is what takes the memory, where another rank is short of it.
    """
    worst = worst_of_ranks(context, lacks)
    side = next((side for side in worst if side in lacks and lacks[side].short), next(iter(worst)))
    mine, others = lacks.get(side), worst[side]
    if mine is not None and mine.short:
        return f"{mine.text}. {mine.cap:,} are allowed; {named(side, others.works)}"
    allowed = f" {mine.cap:,} are allowed" if mine is not None and mine.cap is not None else " More than is allowed"
    return f"{what} needs {others.needed:,} bytes on the {side} of rank {others.rank}.{allowed}; {named(side, others.works)}"
