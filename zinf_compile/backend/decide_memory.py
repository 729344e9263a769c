"""Decides, right after the cut and before the schedule is written, where everything of one captured graph lives: states of its
parameters, and values that its forward saves, under the same caps. Called by `graph_compiler`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from torch import fx

from zinf_compile._torch import outside_tracing
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import just_in_time
from zinf_compile.passes.analysis.saved_time import kinds_of, seconds_away
from zinf_compile.passes.graph.node_facts import mark_moving
from zinf_compile.passes.graph.remade import remaking
from zinf_compile.plan.rough_links import rough_links
from zinf_compile.plan.saved_homes import Candidate, Saving, a_few, first_that_fits, may_leave, moving_ways, savings
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.fit import Fit

from .home_planner import HomePlanner
from .plan_graphs import BYTES_PER_SECOND, FLOPS_PER_SECOND
from .tell_homes import bytes_by_choice, tell_saved


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
    graphs: Sequence[fx.GraphModule],
    memories: Sequence[SavedMemory],
    forced: tuple[SavedMemory, ...],
    tiers: Sequence[Tier],
    budget: GraphBudget,
    homes: HomePlanner | None,
    own_outputs: int | None,
    bucket_bytes: int,
) -> MemoryDecision:
    """Decide where states of parameters and saved values live, and mark the latter. The budget counts by it from now on.

    `graphs`: a forward and its backward, or one without; `memories`: what the forward saves, of which `forced` leaves where a
    word says so, and others may for `tiers`. `homes`: decides those of parameters; None: they are where the budget has them.
    `own_outputs`: the number of a forward's outputs that aren't saved for its backward. Collective where several ranks decide
    together.
    """
    context, placements = budget.context, budget.placements
    results = own_outputs if len(graphs) > 1 else None
    topology = context.link.topology
    open_to = may_leave(memories) if tiers else ()
    if homes is None and not open_to:
        budget.plan_saved(forced)
        return _decided(graphs, placements, memories, forced, budget)
    copies = [just_in_time(gm, bucket_bytes) for gm in graphs]
    _mark(copies, forced or tuple(dataclasses.replace(each, tier=tiers[-1]) for each in open_to))
    scheduled = [gm.graph for gm in copies]
    with outside_tracing():
        budget.decide_for_all(budget.unseen if homes is None else homes.unseen, strict=homes is not None)
        fit = Fit(budget, context, scheduled, results=results, together=homes is not None and homes.together)
        choices: tuple[Saving, ...] = (Saving(forced),)
        if open_to:
            choices = savings(_candidates(graphs[0], fit.performed, open_to, tiers, budget))
        if homes is not None:
            placements = homes.decide(scheduled, fit, a_few(choices))
        saving = first_that_fits(choices, lambda saving: fit.excess(placements, saving.moving))
        over = fit.excess(placements, saving.moving)
    decision = _decided(graphs, placements, memories, saving.moving, budget)
    caps = ((Tier.DEVICE, budget.device_cap, over.device), (Tier.HOST, budget.caps.host, over.host))
    used = [(tier, cap + more, cap) for tier, cap, more in caps if tier in topology.sides]
    if homes is not None:
        decision.told = partial(homes.told, used, tell_saved(decision.saved))
    elif saving.moving:
        decision.told = partial(tell_saved, decision.saved, used=used)
    if not budget.measuring and (homes is not None or saving.moving):
        context.plans.append(decision.told)
    return decision


def _decided(
    graphs: Sequence[fx.GraphModule],
    placements: Placements,
    memories: Sequence[SavedMemory],
    moving: tuple[SavedMemory, ...],
    budget: GraphBudget,
) -> MemoryDecision:
    _mark(graphs, moving)
    remade = remaking(graphs[-1])
    decision = MemoryDecision(placements, bytes_by_choice(memories, moving, frozenset() if remade is None else remade.dropped))
    if len(graphs) > 1 and not budget.measuring:
        budget.context.memory.saved[budget] = decision.saved
    return decision


def _mark(graphs: Sequence[fx.GraphModule], moving: tuple[SavedMemory, ...]) -> None:
    if len(graphs) > 1:
        forward, backward = graphs
        mark_moving(forward, backward, moving)


def _candidates(
    forward: fx.GraphModule,
    performed: Sequence[fx.Graph],
    memories: Sequence[SavedMemory],
    tiers: Sequence[Tier],
    budget: GraphBudget,
) -> list[Candidate]:
    """Return what may leave, and is away for a while where it does."""
    topology, kind = budget.context.link.topology, budget.context.device.type
    links = list(rough_links([Tier.DEVICE, *([Tier.HOST] if topology.host_apart else []), *_drives(tiers)], 1))
    ahead, back = performed
    away = seconds_away(
        ahead,
        back,
        memories,
        flops_per_second=lambda dtype: FLOPS_PER_SECOND.get(kind, 1e14),
        bytes_per_second=BYTES_PER_SECOND.get(kind, 1e12),
        others=budget.others,
    )
    kinds = kinds_of(forward.graph, memories)
    return [
        Candidate(
            bytes=memory.bytes,
            away=away[memory.name],
            ways=moving_ways(memory, tiers, topology, links),
            kind=kinds[memory.name],
        )
        for memory in memories
        if memory.name in away
    ]


def _drives(tiers: Sequence[Tier]) -> list[Tier]:
    return [tier for tier in tiers if not tier.in_memory]
