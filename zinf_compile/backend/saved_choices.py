"""What may become of saved values where a share of the blocks runs again: choices that `decide_memory` weighs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from zinf_compile.ir.placements import Placements
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import copied, just_in_time
from zinf_compile.passes.analysis.saved_memories import find_memories
from zinf_compile.passes.analysis.saved_time import kinds_of, seconds_away
from zinf_compile.passes.graph.node_facts import mark_moving
from zinf_compile.plan.fill_homes import Excess
from zinf_compile.plan.rates import Rates
from zinf_compile.plan.recompute import Outcome
from zinf_compile.plan.saved_homes import Candidate, Saving, beside, first_that_fits, may_leave, moving_ways, savings
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.fit import Fit

from .remake import Remakable
from .step_account import StepAccount


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A forward and its backward right from the cut, or one graph without a backward."""

    graphs: Sequence[fx.GraphModule]
    own_outputs: int | None
    """The number of a forward's outputs that aren't saved for its backward."""
    bucket_bytes: int
    saved: Sequence[SavedMemory] = ()
    """All that the forward saves, before anything of it is dropped."""
    forced: tuple[SavedMemory, ...] = ()
    """What leaves of it where a word says so."""


class SavedChoices:
    """Copies of both graphs where the first blocks run again, and all that may leave is marked; with the choices of what does."""

    def __init__(self, cut: Cut, budget: GraphBudget, tiers: Sequence[Tier], rates: Rates) -> None:
        """`tiers`: where saved values may go. Blocks of the cut may be marked to run again already."""
        self._cut, self._budget, self._tiers, self._rates = cut, budget, tiers, rates
        memories: Sequence[SavedMemory] = ()
        if len(cut.graphs) > 1:
            memories = find_memories(*(gm.graph for gm in cut.graphs), own_outputs=cut.own_outputs or 0)
        self._open = may_leave(memories) if tiers else ()
        copies = [just_in_time(gm, cut.bucket_bytes) for gm in cut.graphs]
        mark_all(copies, cut.forced or tuple(dataclasses.replace(each, tier=tiers[-1]) for each in self._open))
        self.scheduled = [gm.graph for gm in copies]
        """With gathers just in time."""
        self.choices: tuple[Saving, ...] = (Saving(cut.forced),)
        """From all kept to all away."""

    def account(self, fit: Fit) -> None:
        """Count the memory that each choice takes, and find the choices."""
        self.fit = fit
        if self._open:
            self.choices = savings(self._candidates())

    def again(self, remakable: Remakable, blocks: int, account: StepAccount) -> SavedChoices:
        """Return the same where the first blocks run again."""
        forward, backward = map(copied, self._cut.graphs)
        remakable.plan(forward, backward, blocks)
        found = SavedChoices(dataclasses.replace(self._cut, graphs=(forward, backward)), self._budget, self._tiers, self._rates)
        found.account(self.fit.of(found.scheduled))
        found.choices = beside(account.again(found.scheduled, blocks), found.choices)
        return found

    @property
    def blocks(self) -> int:
        """The number of blocks that run again."""
        return self.choices[0].again.blocks

    def excess(self, placements: Placements, saving: Saving) -> Excess:
        """Return the bytes by which one of the choices exceeds what is left, with parameters at these placements."""
        return self.fit.excess(placements, saving.moving)

    def best(self, placements: Placements) -> Saving:
        """Return the choice that fits and of which the least leaves; where none does, the one that lacks least."""
        return first_that_fits(self.choices, lambda saving: self.excess(placements, saving))

    def outcome(self, placements: Placements, account: StepAccount) -> Outcome:
        """Return what the best choice leads to."""
        saving = self.best(placements)
        return Outcome(self.excess(placements, saving).lacking, *account.cost(saving))

    def _candidates(self) -> list[Candidate]:
        """Return what may leave, and is away for a while where it does."""
        budget, memories = self._budget, self._open
        topology, rates = budget.context.link.topology, self._rates
        drives = [tier for tier in self._tiers if not tier.in_memory]
        links = list(rates.links([Tier.DEVICE, *([Tier.HOST] if topology.host_apart else []), *drives], 1))
        ahead, back = self.fit.performed
        away: Mapping[str, float] = seconds_away(
            ahead,
            back,
            memories,
            flops_per_second=rates.flops,
            bytes_per_second=rates.bytes,
            others=budget.others,
        )
        kinds = kinds_of(self._cut.graphs[0].graph, memories)
        return [
            Candidate(
                bytes=memory.bytes,
                away=away[memory.name],
                ways=moving_ways(memory, self._tiers, topology, links),
                kind=kinds[memory.name],
            )
            for memory in memories
            if memory.name in away
        ]


def mark_all(graphs: Sequence[fx.GraphModule], moving: tuple[SavedMemory, ...]) -> None:
    """Mark what leaves between a forward and its backward; nothing where there is no backward."""
    if len(graphs) > 1:
        forward, backward = graphs
        mark_moving(forward, backward, moving)
