"""What the forward and the backward of one captured graph need within the caps, and the refusal that names a cap for both.

`GraphBudget` notes each need as it plans, and asks for the refusal once both are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from zinf_compile.errors import BudgetError
from zinf_compile.ir.compute_shape import tile_range
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context

from .caps import Caps
from .short_ranks import SIDES, Lack, any_rank_short, is_any_short, largest_of_ranks, worst_of_ranks
from .shortage import Need, find_smallest, refusal, refusal_elsewhere


class Works(Protocol):
    """What knows the smallest caps of graphs."""

    def works(self, side: Tier) -> int:
        """Return the least bytes of "device" or "host" memory with which the graphs seen so far work."""


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

    def works(self, side: Tier) -> int:
        """Return the least bytes of "device" or "host" memory with which the graphs seen so far work."""
        return max((need.works for need in self._needs if need.side == side), default=0)

    def lacks(self) -> dict[Tier, Lack]:
        """Return the needs of this rank, by side."""
        return {side: self._lack(side) for side in SIDES}

    def is_short(self, lacks: Mapping[Tier, Lack]) -> bool:
        """Return whether this rank is short, or any of those that plan together. Collective where they do."""
        return any_rank_short(self._context, lacks, what="planning within the caps") if self._together else is_any_short(lacks)

    def refusal(self, own: Works, caps: Caps, lacks: Mapping[Tier, Lack], measure: Callable[[int], Works] | None) -> BudgetError:
        """Return the error that names a cap with which the graphs work, on all ranks where these refuse together.

        `own`: the budget of these graphs. `measure` returns that of the same graphs for another `device_memory`.
        """

        def of_all(number: int) -> int:
            return largest_of_ranks(self._context, number, what="the smallest cap") if self._together else number

        worst = worst_of_ranks(self._context, lacks) if self._together else {}
        smallest = {side: of_all(self.works(side)) for side in SIDES}
        if measure is not None and "device_memory" in caps.options(self._context.link.topology):
            known: dict[int, Works] = {}

            def needed(cap: int) -> int:
                alike = not self._together and tile_range(cap) == tile_range(caps.device)  # with the tiles of these graphs
                known[cap] = own if alike else measure(cap)
                return of_all(known[cap].works(Tier.DEVICE))

            floor = of_all(max((need.fixed + need.added_by_steps for need in self._needs if need.side == Tier.DEVICE), default=0))
            smallest[Tier.DEVICE] = find_smallest(needed, floor=floor, edges=tile_range)
            smallest[Tier.HOST] = of_all(known[max(known)].works(Tier.HOST))
        return refusal(self._needs, smallest) or refusal_elsewhere(self._needs, smallest, worst)

    def _lack(self, side: Tier) -> Lack:
        here = [need for need in self._needs if need.side == side]
        cap = here[0].cap if here else None
        return Lack(max((need.needed for need in here), default=0), cap, self.works(side))
