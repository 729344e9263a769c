"""What the forward and the backward of one captured graph need within the caps, and what follows where that is too much.

`GraphBudget` notes each need as it plans. Once both are known, they have smaller tiles or are refused, with a cap for both.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from zinf_compile.errors import OptionError
from zinf_compile.ir.compute_shape import default_tile, smaller_ranges, tile_range
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context

from .caps import Caps
from .short_ranks import SIDES, Lack, any_rank_short, is_any_short, largest_of_ranks, worst_of_ranks
from .shortage import Need, find_smallest, refusal, refusal_elsewhere, smaller_tiles


class Works(Protocol):
    """What knows the smallest caps of graphs."""

    def works(self, side: Tier, *, trains: bool = False) -> int:
        """Return the least bytes of "device" or "host" memory with which the graphs seen so far work.

        `trains`: also where these evaluate and training comes later, by an estimate.
        """


class Measures(Protocol):
    """What measures the same graphs within other caps of this rank."""

    def __call__(self, device_memory: int) -> Works:
        """Return what they need within another `device_memory`, or one with the same tiles."""

    def within(self, device_memory: int, host_memory: int) -> Works:
        """Return what they need within both."""


_ROUNDS = 4
"""Pairs of caps that are tried for one in which a graph works: at each other homes may be chosen."""


class GraphNeeds:
    """The needs of one captured graph. `together`: all ranks plan for it at the same point, and refuse it together."""

    def __init__(self, context: Context, *, together: bool) -> None:
        self._context, self._together = context, together
        self._needs: list[Need] = []

    def note(self, need: Need, *, at_once: bool) -> None:
        """Count a need; `at_once`: raise `BudgetError` if it is above its cap."""
        self._needs.append(need)
        error = refusal([need], {need.side: need.works}) if at_once else None
        if error is not None:
            raise error

    def works(self, side: Tier, *, trains: bool = False) -> int:
        """See `Works.works`."""
        return max((need.works + need.to_come * trains for need in self._needs if need.side == side), default=0)

    def lacks(self) -> dict[Tier, Lack]:
        """Return the needs of this rank, by side."""
        return {side: self._lack(side) for side in SIDES}

    def is_short(self, lacks: Mapping[Tier, Lack]) -> bool:
        """Return whether this rank is short, or any of those that plan together. Collective where they do."""
        return any_rank_short(self._context, lacks, what="planning within the caps") if self._together else is_any_short(lacks)

    def is_tight(self, lacks: Mapping[Tier, Lack]) -> bool:
        """Return whether this rank, or any that plans with it, has no room for all that steps add. Collective likewise."""
        tight = {side: dataclasses.replace(lack, needed=self.works(side, trains=True)) for side, lack in lacks.items()}
        return any_rank_short(self._context, tight, what="planning for steps") if self._together else is_any_short(tight)

    def settle(
        self,
        own: Works,
        caps: Caps,
        lacks: Mapping[Tier, Lack],
        measure: Measures | None,
        *,
        short: bool,
        may_cut: bool,
    ) -> int | None:
        """Return a smaller `device_memory` with whose tiles the graphs work in this one; None where there is none.

        Of an evaluation, one with whose tiles training works as well, where there is one. Then, if they are `short` of memory as
        they are, it raises the `BudgetError` that names a cap with which they work. All on all ranks, where these plan together.
        `own`: the budget of these graphs. `measure` returns that of the same graphs for another `device_memory`; `may_cut`: its
        tiles can be theirs.
        """

        def of_all(number: int) -> int:
            return largest_of_ranks(self._context, number, what="the smallest cap") if self._together else number

        worst = worst_of_ranks(self._context, lacks) if self._together else {}
        smallest, tile = {side: of_all(self.works(side)) for side in SIDES}, None
        if measure is not None and "device_memory" in caps.options(self._context.link.topology):
            known: dict[int, Works] = {}

            def needed(cap: int, *, trains: bool = False) -> int:
                alike = not self._together and tile_range(cap) == tile_range(caps.device)  # with the tiles of these graphs
                try:
                    known[cap] = own if alike else measure(cap)
                except OptionError:  # more tiles than a graph may have, on all ranks
                    return sys.maxsize
                return of_all(known[cap].works(Tier.DEVICE, trains=trains))

            def with_tiles(cap: int) -> tuple[int, int]:  # the least that works, and a cap with those tiles
                works = needed(cap)
                fitting = smaller_tiles(needed, works, smaller_ranges(cap)) if may_cut else ()
                return min([(works, cap), *fitting])

            allowed = {side: -of_all(-(lacks[side].cap or 0)) for side in SIDES}
            then = {side: of_all(self.works(side, trains=True)) for side in SIDES}
            goals = [(False, smallest)] if short or any(smallest[side] > allowed[side] for side in SIDES) else []
            if may_cut and then != smallest:
                goals.insert(0, (True, then))
            nearest: int | None = None
            for trains, own_works in goals:
                enough = partial(needed, trains=trains)
                for fits, cap in smaller_tiles(enough, own_works[Tier.DEVICE], smaller_ranges(caps.device)):
                    if fits <= allowed[Tier.DEVICE] and of_all(known[cap].works(Tier.HOST, trains=trains)) <= allowed[Tier.HOST]:
                        if may_cut:
                            return cap
                        tile = default_tile(cap)
                        break
                    if trains and not short and needed(cap) <= allowed[Tier.DEVICE]:
                        nearest = cap
            if not short:
                return nearest  # the estimate may be too large: where no tiles will do, those with which training needs least
            fixed = (need.fixed + need.added_by_steps for need in self._needs if need.side == Tier.DEVICE)
            floor = of_all(max(fixed, default=0))
            works = find_smallest(lambda cap: with_tiles(cap)[0], floor=floor, edges=tile_range)
            smallest = {Tier.DEVICE: works, Tier.HOST: of_all(known[with_tiles(works)[1]].works(Tier.HOST))}
            if self._context.link.topology.host_apart and caps.names_host:
                smallest = _that_hold(smallest, {Tier.DEVICE: caps.device, Tier.HOST: caps.host}, measure, of_all)
        if not short:
            return None
        raise refusal(self._needs, smallest, tile) or refusal_elsewhere(self._needs, smallest, worst)

    def _lack(self, side: Tier) -> Lack:
        here = [need for need in self._needs if need.side == side]
        cap = here[0].cap if here else None
        return Lack(max((need.needed for need in here), default=0), cap, self.works(side))


def _that_hold(
    smallest: Mapping[Tier, int], caps: Mapping[Tier, int], measure: Measures, of_all: Callable[[int], int]
) -> dict[Tier, int]:
    """Return the smallest caps, larger where other homes are chosen within both that need more, of one side or the other."""
    found = dict(smallest)
    for _ in range(_ROUNDS):
        allowed = {side: max(found[side], of_all(caps[side])) for side in SIDES}
        then = measure.within(allowed[Tier.DEVICE], allowed[Tier.HOST])
        needed = {side: of_all(then.works(side)) for side in SIDES}
        if all(needed[side] <= allowed[side] for side in SIDES):
            break
        found |= {side: needed[side] for side in SIDES if needed[side] > allowed[side]}
    return found
