"""By how much the graphs of a step exceed the caps, at homes of parameters and with some saved values away."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Hashable, Sequence

from torch import fx

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.saved_memory import SavedMemory, bytes_in_memory
from zinf_compile.ir.sizes import Sides
from zinf_compile.passes.analysis.compute_account import ComputeAccount
from zinf_compile.passes.analysis.memory_needs import TransferNeeds
from zinf_compile.passes.graph.node_facts import counts_all, leaving
from zinf_compile.plan.compute_memory import NO_COMPUTE, ComputeMemory
from zinf_compile.plan.fill_homes import Excess
from zinf_compile.plan.graph_plan import GraphMemory
from zinf_compile.runtime.context import Context

from .budget import GraphBudget
from .compute_to_come import compute_to_come
from .short_ranks import largest_of_ranks, least_of_ranks
from .training_to_come import backward_to_come, gradients_to_come


class Fit:
    """The account of the graphs of one captured graph, a forward and its backward or one without, while it is decided about them.

    It is the account that `GraphBudget` checks the caps by, of training that goes on: with the states and second gradients of the
    first steps.
    """

    def __init__(
        self,
        budget: GraphBudget,
        context: Context,
        graphs: Sequence[fx.Graph],
        *,
        results: int | None,
        together: bool,
    ) -> None:
        """`graphs` have gathers just in time, and marks of all values that may leave; `results`: a forward's other outputs.

        Room is left for what passes through other graphs, which planned for it, and for what graphs to come save and return, in
        proportion to this one's, and compute, as much as this one; after an evaluation also for what training passes. Collective
        where ranks decide `together`: they go by the one with the least room.
        """
        self._budget, self._results = budget, results
        self._apart = context.link.topology.host_apart
        ledgers = (context.memory.ledger, context.memory.host_ledger)
        held = [ledger.total()[0] - ledger.now()["bounce"] for ledger in ledgers]
        caps = (budget.device_cap, budget.caps.host)
        room = [cap - own - more for cap, own, more in zip(caps, held, budget.not_held, strict=True)]
        passing = list(context.memory.reservations.passing_within(Sides(*caps)))
        if together:
            room = [least_of_ranks(context, each, what="room for homes") for each in room]
            passing = [largest_of_ranks(context, each, what="what other graphs pass through memory") for each in passing]
        self._room, self._passing_elsewhere = room, Sides(*passing)
        self._to_come = 0
        if budget.compute.counts:
            self._to_come = compute_to_come(graphs[0], results, budget.counted if budget.unseen else ())
        self._begin(graphs)

    def of(self, graphs: Sequence[fx.Graph]) -> Fit:
        """Return the account of the same graphs with another schedule, in the same room."""
        found = copy.copy(self)
        found._begin(graphs)
        return found

    def _begin(self, graphs: Sequence[fx.Graph]) -> None:
        self._graphs = graphs
        self._compute = self._budget.compute.by_choice(graphs, self._results)
        self._marked = _marked(graphs)
        self._transfers = [TransferNeeds(graph) for graph in graphs]
        self._needs: dict[Hashable, GraphMemory] = {}
        self._least: dict[Hashable, tuple[int, int]] = {}
        evaluated = self._budget.counted if self._budget.compute.counts and len(graphs) == 1 else ()
        self._gradients_to_come = gradients_to_come(evaluated, self._transfers[0].memory(counts_all).gathered)
        """Where these are of an evaluation: bytes of gradients of as much as it gathers at once."""

    @property
    def performed(self) -> list[fx.Graph]:
        """The graphs as they will compute, with all that may leave leaving; none where compute isn't counted."""
        return self._compute.graphs

    def excess(self, placements: Placements, moving: Sequence[SavedMemory]) -> Excess:
        """Return the bytes by which they exceed what is left."""
        budget = self._budget
        budget.plan_saved(moving, placements)
        model, measured = budget.model, self._measured(moving)
        passing = Sides(*map(max, zip(*self._needed(measured), strict=True)))
        found = passing.plus(model.resident).plus(budget.planned.chunk_to_come(model))
        saved_on_host = math.ceil((1 + budget.others) * budget.saved_on_host)
        host = found.host + saved_on_host - self._room[1] if self._apart else 0
        others = budget.saved_by_others(measured[0].saved) if len(measured) > 1 else 0
        return Excess(found.device + others - self._room[0], host)

    def room(self, placements: Placements, moving: Sequence[SavedMemory]) -> list[list[int]]:
        """Return for each node of each graph as it is performed the bytes that it leaves free of what both hold at most.

        What passes through the larger graph is reserved beside gradients and states, whichever of them runs.
        """
        self._budget.plan_saved(moving, placements)
        measured = self._measured(moving)
        rows = [[each.device for each in row] for row in (self._passing(measured), self._needed(measured))]
        below = [min(max(row) - row[number] for row in rows) for number in range(len(measured))]
        free = map(self._budget.compute.free_of_nodes, self._accounts_of(moving))
        return [[more + each for each in row] for more, row in zip(below, free, strict=True)]

    def _passing(self, measured: Sequence[ComputeMemory]) -> list[Sides]:
        """Return the least that passes through each graph."""
        model = self._budget.model
        return [model.transient(self._needs_of(number), compute).least for number, compute in enumerate(measured)]

    def _needed(self, measured: Sequence[ComputeMemory]) -> list[Sides]:
        """Return what each graph needs beside what is held all the while."""
        model, budget = self._budget.model, self._budget
        compute = self._to_come
        if budget.unseen:  # breaks divide no model into equal parts
            compute = max(compute, 3 * max(each.temporaries for each in measured) // 2)
        beside = measured[0].saved if compute else 0
        elsewhere, found = budget.later.plus(Sides(compute + beside, 0)).most(self._passing_elsewhere), []
        if self._gradients_to_come:
            elsewhere = elsewhere.most(backward_to_come(model, self._needs_of(0), measured[0], self._gradients_to_come))
        for number, least in enumerate(self._passing(measured)):
            makes_none = budget.compute.counts and number == 0 < len(self._graphs) - 1  # a forward, beside earlier gradients
            added = model.states.plus(Sides(*(-each for each in budget.second))) if makes_none else model.added_by_steps
            found.append(least.most(elsewhere).plus(added))
        return found

    def at_least(self, placements: Placements, moving: Sequence[SavedMemory]) -> Excess:
        """Return a bound of that, without the transfers: never less with more of the states on the device, or on the host.

        Gradients that stay are taken off the account of compute, but for rounding no more than their own account has of them.
        """
        budget = self._budget
        shards, gradients, states = budget.held_at(placements)
        forward, backward = self._least_compute(moving)
        device = max(forward + gradients.device, backward) + shards.device + states.device
        held = shards.host + gradients.host + states.host + bytes_in_memory(moving)
        device -= budget.second.device  # which room has been left for, and a forward doesn't make
        return Excess(device - self._room[0], held - self._room[1] if self._apart else 0)

    def _least_compute(self, moving: Sequence[SavedMemory]) -> tuple[int, int]:
        """Return the least that a forward's compute takes, and a backward's or a lone graph's, wherever gradients live."""
        key = tuple(memory.name for memory in moving)
        if key not in self._least:
            accounts, outside = self._accounts_of(moving), self._budget.compute.outside
            peaks = [account.memory().peak + outside for account in accounts] or [0]
            rest = self._budget.placements.rest
            counted = {slot.index for slot in self._budget.counted}
            rounding = 0
            for part in itertools.chain.from_iterable(account.stretches for account in accounts):
                if (slot := part.gradient) is not None:
                    gradient = format_of(rest.reduce_dtype_of(slot.dtype)).bytes(slot.numel) if slot.index in counted else 0
                    rounding += max(0, part.own - 2 * gradient)
            others = self._budget.saved_by_others(accounts[0].saved) if len(accounts) > 1 else 0
            forward = peaks[0] if len(peaks) > 1 else 0
            self._least[key] = forward + others, peaks[-1] + others - rounding
        return self._least[key]

    def _needs_of(self, number: int) -> GraphMemory:
        """Return what gathers and reductions need; placements change that by which gathers take memory alone."""
        key = number, self._budget.counts == counts_all, self._budget.gathered
        if key not in self._needs:
            self._needs[key] = self._transfers[number].memory(self._budget.counts)
        return self._needs[key]

    def _measured(self, moving: Sequence[SavedMemory]) -> list[ComputeMemory]:
        accounts = self._accounts_of(moving)
        return [self._budget.compute.memory(account) for account in accounts] or [NO_COMPUTE for _ in self._graphs]

    def _accounts_of(self, moving: Sequence[SavedMemory]) -> list[ComputeAccount]:
        return self._compute.accounts(self._marked - {name for memory in moving for name in memory.inputs})


def _marked(graphs: Sequence[fx.Graph]) -> frozenset[str]:
    """Return the names of the values that are marked as moving in a forward, and its backward."""
    owners = [graph.owning_module for graph in graphs]
    return frozenset(name for gm in owners if isinstance(gm, fx.GraphModule) for memory in leaving(gm) for name in memory.inputs)
