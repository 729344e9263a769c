"""Decides, right after the cut and before the schedule is written, where everything of one captured graph lives: states of its
parameters, and values that its forward saves, under the same caps. Called by `graph_compiler`.

Note: what is made again
    Only where something would have to leave, and compute would wait for it: then shares of the blocks that could run again are
    weighed against moving. What a rank moves is its own affair, but blocks that run again gather their parameters: the share is
    one that ranks agree on. A rank that compiles again alone keeps to what was agreed for the same collectives.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import fx

from zinf_compile._torch import outside_tracing
from zinf_compile.config import Config
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.memory_needs import ahead_key
from zinf_compile.passes.analysis.saved_memories import find_memories
from zinf_compile.passes.graph.remade import remaking
from zinf_compile.plan.fill_homes import Excess
from zinf_compile.plan.rates import Rates
from zinf_compile.plan.recompute import Outcome, best_share, may_be_best, shares, worst_of
from zinf_compile.plan.saved_homes import Saving, a_few, may_leave
from zinf_compile.sharded.allowed_homes import may_remake, saved_tiers
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.fit import Fit
from zinf_compile.sharded.short_ranks import largest_of_ranks

from .home_planner import HomePlanner
from .keep_units import keep_units
from .remake import Remakable
from .saved_choices import Cut, SavedChoices, mark_all
from .step_account import StepAccount
from .tell_homes import bytes_by_choice, tell_saved

FEW = 3
"""Choices of what moves beside a share of blocks that runs again, while homes are decided."""


class MemoryDecision:
    """What was decided for one captured graph."""

    def __init__(self, placements: Placements, saved: Mapping[str, int] = MappingProxyType({})) -> None:
        self.placements = placements
        """Of the parameters."""
        self.saved = saved
        """Bytes of what the forward saves, by what becomes of them: "keep", "recompute" or a tier."""
        self.told: Callable[[], str] = str
        """Returns the decision as text; empty where there was none to make."""


def decide_memory(
    cut: Cut, config: Config, budget: GraphBudget, homes: HomePlanner | None, *, together: bool = False
) -> MemoryDecision:
    """Decide where states of parameters and saved values live, and what is made again; mark it in the graphs of the cut.

    The budget counts by it from now on. `homes`: decides those of parameters; None: they are where the budget has them.
    `together`: ranks compile at the same point. Collective where several decide together.
    """
    return _Decision(cut, config, budget, homes, together=together).run()


class _Decision:
    def __init__(self, cut: Cut, config: Config, budget: GraphBudget, homes: HomePlanner | None, *, together: bool) -> None:
        self._cut, self._budget, self._homes = cut, budget, homes
        self._context, self._placements = budget.context, budget.placements
        self._has_backward = len(cut.graphs) > 1
        self._may_remake = may_remake(config) and self._has_backward
        self._together = together and self._context.size > 1
        self._tiers = saved_tiers(config, self._context.link.topology)
        self._rates = Rates.of(budget.context.device.type, config.machine_name(), budget.context.rates)
        self._remakable: Remakable | None = None
        self._config = config
        self._kept = ""
        self._found: list[SavedChoices] = []
        """First without blocks that run again, then the shares that are weighed."""

    def run(self) -> MemoryDecision:
        budget, homes = self._budget, self._homes
        is_open = bool(self._tiers and may_leave(self._cut.saved))
        if homes is None and not is_open and not self._may_remake:
            budget.plan_saved(self._cut.forced)
            self._keep_units(self._spare)
            return self._decided(self._cut.forced)  # words say the rest
        trial = budget if homes is not None or is_open else copy.copy(budget)  # it checks as it always does if nothing leaves
        base = SavedChoices(self._cut, trial, self._tiers, self._rates)
        with outside_tracing():
            trial.decide_for_all(budget.unseen if homes is None else homes.unseen, strict=homes is not None)
            base.account(self._fit(trial, base.scheduled))
            self._found = [base]
            account = self._account(base)
            if homes is not None:
                self._placements = homes.decide(account, self._fit_of, a_few(base.choices))
            share = self._share(account)
            best = share.best(self._placements)
            over = share.excess(self._placements, best)
        if trial is not budget:
            budget.plan_saved(best.moving)
        if self._remakable is not None:
            forward, backward = self._cut.graphs
            self._remakable.plan(forward, backward, share.blocks)
        self._keep_units(lambda: -over.device)
        return self._told(self._decided(best.moving), over, is_tight=bool(best.moving or share.blocks))

    def _keep_units(self, spare: Callable[[], int]) -> None:
        """Let full units stay gathered for the backward in what is left on the device."""
        cut = self._cut
        self._kept = keep_units(
            cut.graphs,
            cut.own_outputs or 0,
            self._config,
            self._budget,
            bucket_bytes=cut.bucket_bytes,
            spare=spare,
            together=self._together,
        )

    def _spare(self) -> int:
        """Return the bytes that the device's cap leaves where words have decided about everything."""
        trial = copy.copy(self._budget)
        trial.decide_for_all(trial.unseen, strict=False)
        base = SavedChoices(self._cut, trial, (), self._rates)
        base.account(self._fit(trial, base.scheduled))
        return -base.excess(self._placements, base.choices[0]).device

    def _fit(self, budget: GraphBudget, scheduled: Sequence[fx.Graph]) -> Fit:
        homes, results = self._homes, self._cut.own_outputs if self._has_backward else None
        together = homes is not None and homes.together
        return Fit(budget, self._context, scheduled, results=results, together=together)

    def _account(self, base: SavedChoices) -> StepAccount:
        if self._homes is not None:
            return self._homes.account(base.scheduled, self._rates)
        return StepAccount(base.scheduled, self._context, self._placements, self._rates)

    def _fit_of(self, saving: Saving) -> Fit:
        return next(each for each in self._found if each.blocks == saving.again.blocks).fit

    def _share(self, account: StepAccount) -> SavedChoices:
        """Return what is chosen from, where the share of blocks that is best for all ranks runs again."""
        (base,) = self._found
        if not self._may_remake:
            return base
        agreed = self._budget.context.memory.reservations.remade
        key: Hashable = self._budget.signature, *map(ahead_key, base.scheduled)
        if self._context.size > 1 and not self._together:
            if count := agreed.get(key, 0):
                self._weigh(account, count)
            return self._found[-1]
        outcome = base.outcome(self._placements, account)
        worst = [outcome]
        if self._any_rank(bool(outcome.lacking) or outcome.busiest > account.least_seconds):
            worst = self._weigh_shares(account, outcome)
        if self._homes is not None and len(self._found) > 1:
            choices = [a_few(each.choices, most=FEW) if each.blocks else a_few(each.choices) for each in self._found]
            self._placements = self._homes.decide(account, self._fit_of, list(itertools.chain(*choices)))
            worst = self._worst([each.outcome(self._placements, account) for each in self._found])
        chosen = self._found[best_share(worst)]
        if not self._budget.measuring:
            agreed[key] = chosen.blocks
        return chosen

    def _weigh_shares(self, account: StepAccount, kept: Outcome) -> list[Outcome]:
        """Weigh shares from the smallest on, while one more could be best; return what each leads to where that is worst.

        `kept`: the first of them, without blocks that run again. What a share runs again takes its time, wherever all else goes.
        """
        blocks, found = self._blocks(), self._worst([kept])
        counts = shares(blocks.blocks)
        seconds = [account.least_seconds_again(blocks.compute_of(count)) for count in counts]
        for count, least in zip(counts, self._worst([Outcome(0.0, each, 0.0) for each in seconds]), strict=True):
            if not may_be_best(least, found):
                break
            self._weigh(account, count)
            found += self._worst([self._found[-1].outcome(self._placements, account)])
        return found

    def _weigh(self, account: StepAccount, count: int) -> None:
        self._found.append(self._found[0].again(self._blocks(), count, account))

    def _blocks(self) -> Remakable:
        """Return the blocks that could run again."""
        if self._remakable is None:
            forward, backward = self._cut.graphs
            own = self._cut.own_outputs or 0
            self._remakable = Remakable(forward, backward, bucket_bytes=self._cut.bucket_bytes, own_outputs=own)
        return self._remakable

    def _any_rank(self, mine: bool) -> bool:
        return bool(largest_of_ranks(self._context, int(mine), what="room for saved values")) if self._together else mine

    def _worst(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return what each share leads to on the rank where that is worst."""
        if not (self._together and outcomes):
            return list(outcomes)
        mine = torch.tensor(outcomes, dtype=torch.float64).flatten()
        rows = self._context.ranks.exchange(mine, what="what is computed again").tolist()
        return worst_of([[Outcome(*row[at : at + 3]) for at in range(0, len(row), 3)] for row in rows])

    def _decided(self, moving: tuple[SavedMemory, ...]) -> MemoryDecision:
        graphs, saved = self._cut.graphs, list(self._cut.saved)
        remade = remaking(graphs[-1])
        if self._has_backward:
            now = find_memories(graphs[0].graph, graphs[1].graph, own_outputs=self._cut.own_outputs or 0)
            places = {memory.name: memory for memory in now}
            moving = tuple(
                dataclasses.replace(places[each.name], tier=each.tier, lag=each.lag, lead=each.lead) for each in moving
            )
            saved = [*now, *(each for each in saved if remade is not None and set(each.inputs) <= remade.dropped)]
        mark_all(graphs, moving)
        found = bytes_by_choice(saved, moving, frozenset() if remade is None else remade.dropped)
        decision = MemoryDecision(self._placements, found)
        if self._has_backward and not self._budget.measuring:
            self._context.memory.saved[self._budget] = decision.saved
        return decision

    def _told(self, decision: MemoryDecision, over: Excess, *, is_tight: bool) -> MemoryDecision:
        """Say what was decided at the first step."""
        budget, homes = self._budget, self._homes
        caps = ((Tier.DEVICE, budget.device_cap, over.device), (Tier.HOST, budget.caps.host, over.host))
        used = [(tier, cap + more, cap) for tier, cap, more in caps if tier in self._context.link.topology.sides]
        if homes is not None:
            decision.told = partial(homes.told, used, "     ".join(filter(None, [tell_saved(decision.saved), self._kept])))
        elif is_tight or self._kept:
            decision.told = partial(tell_saved, decision.saved, used=used, kept=self._kept)
        if not budget.measuring and (homes is not None or is_tight or self._kept):
            self._context.plans.append(decision.told)
        return decision


__all__ = ["Cut", "MemoryDecision", "decide_memory"]
