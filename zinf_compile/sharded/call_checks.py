"""Checks of each call of a graph within the caps, before it runs: of second gradients, and of what earlier calls left behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from zinf_compile.errors import BudgetError
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.unit import Unit

from .budget import GraphBudget
from .budget_checks import lack_of_second_gradients, refuse_second_gradients
from .compute_budget import call_of, lack_for_call
from .saved_on_host import lack_on_host
from .short_ranks import Lack, refusal_text
from .shortage import BATCH_TOO_LARGE, name_cap


class CallChecks:
    """Those of one graph: a backward makes gradients, a forward or a graph without a backward makes activations."""

    def __init__(self, budget: GraphBudget | None, context: Context, *, makes_gradients: bool) -> None:
        self._budget, self._context = budget, context
        self._makes_gradients = makes_gradients
        self.counts = not makes_gradients and budget is not None and budget.compute.counts
        """Whether the graph's results are activations that count."""

    @property
    def reservations(self) -> frozenset[int]:
        """The identities of the graph's reservations, and its backward's."""
        call = None if self._budget is None else call_of(self._budget.compute, self._budget.reservations)
        return frozenset(() if call is None else map(id, call.reservations))

    def lack(self, units: Iterable[Unit], args: Sequence[Any]) -> Mapping[Tier, Lack]:
        """Return, by side, what a call with these units and arguments lacks."""
        if self._makes_gradients:
            return lack_of_second_gradients(self._context, units)
        budget, found = self._budget, dict[Tier, Lack | None]()
        if budget is None:
            return {}
        found[Tier.HOST] = lack_on_host(self._context, budget.reservations, budget.saved_on_host, units, others=budget.others)
        if self.counts and (call := call_of(budget.compute, budget.reservations)) is not None:
            found[Tier.DEVICE] = lack_for_call(self._context, call, units, args)
        return {side: lack for side, lack in found.items() if lack is not None}

    def refuse(self, context: Context, lacks: Mapping[Tier, Lack]) -> NoReturn:
        """Raise `BudgetError`, on all ranks, where one lacks memory. Collective."""
        if self._makes_gradients:
            refuse_second_gradients(context, lacks)
        text = refusal_text(context, lacks, partial(name_cap, context), what="a call")
        raise BudgetError(f"{text}. {BATCH_TOO_LARGE}")
