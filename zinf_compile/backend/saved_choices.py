"""What may become of saved values where a share of the blocks runs again: choices that `decide_memory` weighs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from zinf_compile.ir.placements import Placements
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import copied, region_passes, run_passes
from zinf_compile.passes.analysis.saved_memories import find_memories
from zinf_compile.passes.analysis.saved_stretches import away_between, least_of_stretches, stretch_seconds
from zinf_compile.passes.analysis.saved_time import kinds_of, seconds_away
from zinf_compile.passes.analysis.step_facts import StepFacts
from zinf_compile.passes.graph.node_facts import mark_moving
from zinf_compile.plan.fill_homes import Excess
from zinf_compile.plan.problem_parts import Link
from zinf_compile.plan.rates import Rates
from zinf_compile.plan.recompute import Outcome
from zinf_compile.plan.saved_homes import (
    Candidate,
    Saving,
    beside,
    first_blocks_first,
    first_that_fits,
    hops_of,
    least_that_fits,
    may_leave,
    moving_ways,
    savings,
)
from zinf_compile.plan.saved_schedule import Move, Stretches, seconds_of, spread
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

    def __init__(self, cut: Cut, budget: GraphBudget, tiers: Sequence[Tier], rates: Rates, *, in_place: bool = False) -> None:
        """`tiers`: where saved values may go. `in_place`: the graphs are copies with blocks that run again, to be changed."""
        self._cut, self._budget, self._tiers, self._rates = cut, budget, tiers, rates
        memories: Sequence[SavedMemory] = ()
        if len(cut.graphs) > 1:
            memories = find_memories(*(gm.graph for gm in cut.graphs), own_outputs=cut.own_outputs or 0)
        self._open = may_leave(memories) if tiers else ()
        passes = region_passes(bucket_bytes=cut.bucket_bytes)
        copies = [run_passes(gm if in_place else copied(gm), passes) for gm in cut.graphs]
        mark_all(copies, cut.forced or tuple(dataclasses.replace(each, tier=tiers[-1]) for each in self._open))
        self.scheduled = [gm.graph for gm in copies]
        """With gathers just in time."""
        self.choices: tuple[Saving, ...] = (Saving(cut.forced),)
        """From all kept to all away."""
        self._orders: tuple[tuple[Saving, ...], ...] = (self.choices,)
        """The same in other orders, too."""
        self._away: Mapping[str, tuple[int, int]] = {}
        self._seconds: Sequence[Sequence[float]] = ()
        """Of the stretches of both graphs, where something may leave."""

    def account(self, fit: Fit) -> None:
        """Count the memory that each choice takes, and find the choices."""
        self.fit = fit
        if self._open and fit.performed:
            ahead, back = fit.performed
            self._away = away_between(ahead, back, self._open)
            self._seconds = [stretch_seconds(graph, self._facts()) for graph in (ahead, back)]
            candidates = self._candidates()
            self.choices = savings(candidates)
            self._orders = self.choices, first_blocks_first(candidates)

    def again(self, remakable: Remakable, blocks: int, account: StepAccount) -> SavedChoices:
        """Return the same where the first blocks run again."""
        forward, backward = map(copied, self._cut.graphs)
        remakable.plan(forward, backward, blocks)
        cut = dataclasses.replace(self._cut, graphs=(forward, backward))
        found = SavedChoices(cut, self._budget, self._tiers, self._rates, in_place=True)
        found.account(self.fit.of(found.scheduled))
        again = account.again(found.scheduled, blocks)
        found.choices = beside(again, found.choices)
        found._orders = tuple(beside(again, choices) for choices in found._orders)
        return found

    @property
    def blocks(self) -> int:
        """The number of blocks that run again."""
        return self.choices[0].again.blocks

    def excess(self, placements: Placements, saving: Saving) -> Excess:
        """Return the bytes by which one of the choices exceeds what is left, with parameters at these placements."""
        return self.fit.excess(placements, saving.moving)

    def best(self, placements: Placements) -> Saving:
        """Return the choice that fits and of which the least leaves, in the order with which compute waits least.

        Where none fits, the one that lacks least. Transfers are as spread out as there is room.
        """
        return self._best(placements)[0]

    def outcome(self, placements: Placements, account: StepAccount) -> Outcome:
        """Return what the best choice leads to."""
        saving, waits = self._best(placements)
        busiest, moving = account.cost(saving)
        return Outcome(self.excess(placements, saving).lacking, max(busiest, account.compute_seconds(saving) + waits), moving)

    def _best(self, placements: Placements) -> tuple[Saving, float]:
        """Return the best choice, and the seconds for which compute waits with it."""
        found = []
        for find, order in zip((first_that_fits, least_that_fits), self._orders, strict=False):
            saving = find(order, lambda saving: self.excess(placements, saving))
            moving, waits = self._spread_out(saving, placements)
            found.append((self.excess(placements, saving).lacking, waits, dataclasses.replace(saving, moving=moving)))
        _, waits, best = min(found, key=lambda row: row[:2])
        return best, waits

    def _spread_out(self, saving: Saving, placements: Placements) -> tuple[tuple[SavedMemory, ...], float]:
        """Return what leaves, with transfers as late and early as there is room, and the seconds for which compute waits then."""
        if not (saving.moving and self._seconds):
            return saving.moving, 0.0
        topology, links = self._budget.context.link.topology, list(self._links())
        moves = []
        for memory in saving.moving:
            if memory.name in self._away:
                left, due = self._away[memory.name]
                out, back = hops_of(memory, topology, links)
                moves.append(Move(name=memory.name, bytes=memory.bytes, left=left, due=due, out=out, back=back))
        rooms = map(least_of_stretches, self.fit.performed, self.fit.room(placements, saving.moving))
        spread_out = spread(moves, *(Stretches(*row) for row in zip(self._seconds, rooms, strict=True)))
        waits = seconds_of(spread_out, *self._seconds) - sum(map(sum, self._seconds))
        when = {move.name: (move.lag, move.lead) for move in spread_out}
        spread_over = ((memory, *when.get(memory.name, (1, 1))) for memory in saving.moving)
        moving = tuple(dataclasses.replace(memory, lag=lag, lead=lead) for memory, lag, lead in spread_over)
        return moving, max(0.0, waits)

    def _links(self) -> Iterator[Link]:
        drives = [tier for tier in self._tiers if not tier.in_memory]
        beside = [Tier.HOST] if self._budget.context.link.topology.host_apart else []
        return self._rates.links([Tier.DEVICE, *beside, *drives], 1)

    def _facts(self) -> StepFacts:
        return StepFacts(memories=(), flops_per_second=self._rates.flops, bytes_per_second=self._rates.bytes)

    def _candidates(self) -> list[Candidate]:
        """Return what may leave, and is away for a while where it does."""
        budget, memories = self._budget, self._open
        topology, rates = budget.context.link.topology, self._rates
        links = list(self._links())
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
