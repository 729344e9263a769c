"""Decides the homes of the parameters of one captured graph, once its forward and backward are known, from the caps.

`GraphCompiler` calls it before the schedule is written; `fill_homes` chooses, by the account of memory of the graph's budget.
Rank 0 chooses for all ranks: shards are alike.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from zinf_compile._torch import outside_tracing
from zinf_compile.config import Config
from zinf_compile.ir.placements import KINDS, Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import region_passes, run_passes
from zinf_compile.passes.analysis.step_facts import StepFacts
from zinf_compile.passes.analysis.step_problem import step_problem, unit_members
from zinf_compile.plan.fill_homes import fill_homes
from zinf_compile.plan.memory_model import adam_states
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.problem_parts import Allowed, Link, Memory
from zinf_compile.runtime.context import Context
from zinf_compile.sharded.allowed_homes import allowed_homes
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.promised import unseen_parameters

from .plan_graphs import BETWEEN_RANKS, BYTES_PER_SECOND, COPIES, DRIVE, FLOPS_PER_SECOND

_log = logging.getLogger("zinf_compile")


class HomePlanner:
    """Decides for the parameters of one captured graph that have no home yet."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[ParameterSlot],
        inputs: Sequence[Any],
        placements: Placements,
        context: Context,
        *,
        together: bool,
    ) -> None:
        """`placements`: of those that have one; `together`: all ranks decide at the same point."""
        self._context = context
        self._placements = placements
        self._unseen = unseen_parameters(inputs[slot.index] for slot in slots)
        self._together = together and context.size > 1
        self._allowed = allowed_homes(config, context.link.topology)

    def decide(self, graphs: Sequence[fx.GraphModule], budget: GraphBudget, *, bucket_bytes: int) -> Placements:
        """Return the placements of all parameters; the budget goes by them from now on. Collective where ranks plan together."""
        scheduled = [_just_in_time(gm, bucket_bytes) for gm in graphs]
        problem = step_problem([(scheduled[0], scheduled[1] if len(scheduled) > 1 else None)], self._facts())
        members = unit_members(scheduled)
        with outside_tracing():
            excess = budget.decide_for_all(self._unseen)
            if self._context.size > 1 and not self._together:  # a rank alone: as far away as all others may have it
                found = self._placements
            else:
                filled = fill_homes(problem, lambda homes: excess(self._placed(homes, members), scheduled))
                homes = filled.homes
                if self._together:
                    homes = self._context.ranks.share(homes, what="sharing homes")
                found = self._placed(homes, members)
        budget.place(found)
        return found

    def _placed(self, homes: Homes, members: Mapping[str, Sequence[ParameterSlot]]) -> Placements:
        own = dict(self._placements.own)
        states: dict[str, Tier] = {}
        for piece, tier in homes.states.items():
            states.setdefault(piece.rpartition(" #")[0] or piece, tier)
        for name, slots in members.items():
            tiers = {"params": homes.params.get(name), "grads": homes.grads.get(name), "optimizer": states.get(name)}
            given: dict[str, Any] = {k: tier for k, tier in tiers.items() if tier is not None and len(self._allowed[k]) > 1}
            for slot in slots:
                if slot.index not in self._placements.own:
                    own[slot.index] = dataclasses.replace(self._placements.rest, **given)
        return Placements(self._placements.rest, own)

    def _facts(self) -> StepFacts:
        context, kind = self._context, self._context.device.type
        far = {tier for tiers in self._allowed.values() for tier in tiers}
        far |= {getattr(own, each) for own in self._placements.own.values() for each in KINDS}
        beside = [Tier.HOST] if context.link.topology.host_apart else []
        tiers = [Tier.DEVICE, *beside, *sorted(far - {Tier.DEVICE, Tier.HOST}, key=_distance)]
        rest = self._placements.rest
        return StepFacts(
            memories=tuple(Memory(tier=tier) for tier in tiers),
            links=tuple(links_between(tiers, context.size)),
            world_size=context.size,
            allowed=Allowed(
                params=self._on(tiers, "params"), grads=self._on(tiers, "grads"), states=self._on(tiers, "optimizer")
            ),
            flops_per_second=lambda dtype: FLOPS_PER_SECOND.get(kind, 1e14),
            bytes_per_second=BYTES_PER_SECOND.get(kind, 1e12),
            state_types=lambda slot: tuple(adam_states(rest, slot.dtype).values()),
            has_master=lambda slot: rest.master_of(slot.dtype) is not None,
            piece_numel=rest.piece_numel,
        )

    def _on(self, tiers: Sequence[Tier], kind: str) -> tuple[Tier, ...]:
        return tuple(dict.fromkeys(tier if tier in tiers else Tier.DEVICE for tier in self._allowed[kind]))


def links_between(tiers: Sequence[Tier], size: int) -> Iterator[Link]:
    """Yield links at rough rates, from near to far, and those between `size` ranks; a drive reads and writes at one rate."""
    for near, far in itertools.pairwise(tiers):
        for source, to in ((near, far), (far, near)):
            rate, lane = (COPIES, "") if far.in_memory else (DRIVE, str(far))
            yield Link(name=f"{source} to {to}", source=source, destination=to, bytes_per_second=rate, lane=lane)
    if size > 1:
        yield Link(name="from ranks", source=None, destination=Tier.DEVICE, bytes_per_second=BETWEEN_RANKS)
        yield Link(name="to ranks", source=Tier.DEVICE, destination=None, bytes_per_second=BETWEEN_RANKS)


def _just_in_time(gm: fx.GraphModule, bucket_bytes: int) -> fx.Graph:
    """Return the graph with gathers just in time, a copy: the compiler goes on with the original."""
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    return run_passes(copied, region_passes(bucket_bytes=bucket_bytes)).graph


def _distance(tier: Tier) -> int:
    return tier.distance
