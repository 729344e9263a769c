"""By how much the graphs of a step exceed the caps, at homes of parameters and with some saved values away."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.sizes import Sides
from zinf_compile.passes.analysis.compute_account import ComputeAccount
from zinf_compile.passes.analysis.memory_needs import measure_needs
from zinf_compile.passes.graph.node_facts import leaving
from zinf_compile.plan.compute_memory import NO_COMPUTE, ComputeMemory
from zinf_compile.plan.fill_homes import Excess
from zinf_compile.plan.graph_plan import GraphMemory
from zinf_compile.runtime.context import Context

from .budget import GraphBudget
from .short_ranks import least_of_ranks

_GATHERING = (ops.all_gather, ops.gather_rows, ops.wait, ops.release)
"""Operators of which the account of a graph asks whether they take memory."""


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

        Room is left for what graphs to come save and return, in proportion to this one's. Collective where ranks decide
        `together`: they go by the one with the least room.
        """
        self._budget, self._graphs, self._results = budget, graphs, results
        self._apart = context.link.topology.host_apart
        ledgers = (context.memory.ledger, context.memory.host_ledger)
        held = [ledger.total()[0] - ledger.now()["bounce"] for ledger in ledgers]
        caps = (budget.device_cap, budget.caps.host)
        room = [cap - own - promised for cap, own, promised in zip(caps, held, budget.promised, strict=True)]
        if together:
            room = [least_of_ranks(context, each, what="room for homes") for each in room]
        self._room = room
        self._facts = budget.compute.facts(graphs)
        self._marked = _marked(graphs)
        self._accounts: dict[frozenset[str], list[ComputeAccount]] = {}
        self._gathers = [[node for node in graph.nodes if node.target in _GATHERING] for graph in graphs]
        self._needs: dict[Hashable, GraphMemory] = {}

    @property
    def performed(self) -> list[fx.Graph]:
        """The graphs as they will compute, with all that may leave leaving; none where compute isn't counted."""
        return [known.graph for known in self._facts]

    def excess(self, placements: Placements, moving: Sequence[SavedMemory]) -> Excess:
        """Return the bytes by which they exceed what is left."""
        budget = self._budget
        budget.plan_saved(moving, placements)
        model, found = budget.model, Sides(0, 0)
        measured = self._measured(moving)
        for number, (graph, compute) in enumerate(zip(self._graphs, measured, strict=True)):
            least = model.transient(self._needs_of(number, graph), compute).least
            makes_none = budget.compute.counts and number == 0 < len(self._graphs) - 1  # a forward, beside earlier gradients
            needed = Sides(*map(max, least, budget.later)).plus(model.states if makes_none else model.added_by_steps)
            found = Sides(*map(max, found, needed))
        found = found.plus(model.resident).plus(model.chunk)
        host = found.host + budget.saved_on_host - self._room[1] if self._apart else 0
        others = budget.saved_by_others(measured[0].saved) if len(measured) > 1 else 0
        return Excess(found.device + others - self._room[0], host)

    def _needs_of(self, number: int, graph: fx.Graph) -> GraphMemory:
        """Return what gathers and reductions need; placements change that by which gathers take memory alone."""
        key = number, tuple(map(self._budget.counts, self._gathers[number]))
        if key not in self._needs:
            self._needs[key] = measure_needs(graph, counts=self._budget.counts)
        return self._needs[key]

    def _measured(self, moving: Sequence[SavedMemory]) -> list[ComputeMemory]:
        compute = self._budget.compute
        if not compute.counts:
            return [NO_COMPUTE for _ in self._graphs]
        stays = self._marked - {name for memory in moving for name in memory.inputs}
        if stays not in self._accounts:
            self._accounts[stays] = compute.accounts(self._facts, self._results, stays)
        return [compute.memory(account) for account in self._accounts[stays]]


def _marked(graphs: Sequence[fx.Graph]) -> frozenset[str]:
    """Return the names of the values that are marked as moving in a forward, and its backward."""
    owners = [graph.owning_module for graph in graphs]
    return frozenset(name for gm in owners if isinstance(gm, fx.GraphModule) for memory in leaving(gm) for name in memory.inputs)
