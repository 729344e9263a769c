"""What a step of one captured graph takes at rates that are assumed, for the decisions about it: made right after the cut."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial

from torch import fx

from zinf_compile.ir.forward_compute import Again
from zinf_compile.ir.placements import KINDS, Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import SMALL_NUMEL
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.run_again import GraphCosts, cost_again, graph_costs
from zinf_compile.passes.analysis.step_facts import StepFacts
from zinf_compile.passes.analysis.step_problem import operation_seconds, step_problem, unit_members
from zinf_compile.plan.fill_together import seconds_at, together_seconds
from zinf_compile.plan.memory_model import adam_states, shard_numel
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.planners._build import nearest
from zinf_compile.plan.problem_parts import Allowed, Memory
from zinf_compile.plan.rates import Rates
from zinf_compile.plan.saved_homes import KEPT, Saving
from zinf_compile.runtime.context import Context


class StepAccount:
    """The problem of the step, with everything of the graphs kept, and the homes of parameters in it."""

    def __init__(
        self,
        scheduled: Sequence[fx.Graph],
        context: Context,
        placements: Placements,
        rates: Rates,
        allowed: Mapping[str, tuple[Tier, ...]] | None = None,
    ) -> None:
        """`scheduled`: a forward and its backward, or one without, with gathers just in time.

        `allowed`: the tiers by kind of states on which they may live; None: they are where `placements` say.
        """
        self._scheduled, self._open = scheduled, allowed is not None
        self._facts = _facts(context, placements, rates, allowed)
        self.problem = step_problem([(scheduled[0], scheduled[1] if len(scheduled) > 1 else None)], self._facts)
        self.members = unit_members(scheduled, self._facts.home, apart=self._facts.apart)
        """The slots of each unit of the problem, by its name."""
        self.homes = Homes()
        """Where the units live; those that are still open are decided later."""
        if not self._open:
            at = {unit.name: placements.of(self.members[unit.name][0]) for unit in self.problem.units}
            on = partial(_known, self.problem.tiers)
            self.homes = Homes(
                params={name: on(own.params) for name, own in at.items()},
                grads={unit.name: on(at[unit.name].grads) for unit in self.problem.units if unit.trained},
                states={piece.name: on(at[piece.units[0]].optimizer) for piece in self.problem.pieces},
            )

    @property
    def least_seconds(self) -> float:
        """Return the seconds of a step that keeps all saved values, with homes as near as may be: none takes less."""
        return self._seconds(self.nearest if self._open else self.homes, KEPT)[0]

    @cached_property
    def nearest(self) -> Homes:
        """Homes as near as is allowed."""
        return nearest(self.problem)

    def cost(self, saving: Saving) -> tuple[float, float]:
        """Return the seconds of a step's busiest lane with a choice for saved values, and those of all links."""
        return self._seconds(self.homes, saving)

    def compute_seconds(self, saving: Saving) -> float:
        """Return the seconds that compute takes with a choice for saved values."""
        return self.problem.compute_seconds + saving.again.seconds

    def _seconds(self, homes: Homes, saving: Saving) -> tuple[float, float]:
        return (together_seconds if self._open else seconds_at)(self.problem, homes, saving)

    def again(self, scheduled: Sequence[fx.Graph], blocks: int) -> Again:
        """Return what it takes beside that so many blocks run again, as they do in these graphs."""
        return cost_again(self._costs, graph_costs(scheduled, self._facts), self._facts, self.members, blocks=blocks)

    @cached_property
    def _costs(self) -> GraphCosts:
        return graph_costs(self._scheduled, self._facts)

    def least_seconds_again(self, compute: Sequence[Sequence[fx.Node]]) -> float:
        """Return seconds that no step takes less than in which this compute of the forward runs again."""
        return self.problem.compute_seconds + sum(operation_seconds(nodes, self._facts) for nodes in compute)


def _facts(context: Context, placements: Placements, rates: Rates, allowed: Mapping[str, tuple[Tier, ...]] | None) -> StepFacts:
    rest = placements.rest
    homes = [*placements.own.values(), *([placements.rest] if allowed is None else [])]
    far = {tier for tiers in (allowed or {}).values() for tier in tiers}
    far |= {getattr(own, each) for own in homes for each in KINDS}
    beside = [Tier.HOST] if context.link.topology.host_apart else []
    tiers = [Tier.DEVICE, *beside, *sorted(far - {Tier.DEVICE, Tier.HOST}, key=lambda tier: tier.distance)]

    def on(kind: str) -> tuple[Tier, ...]:
        return tuple(dict.fromkeys(_known(tiers, tier) for tier in (allowed or {}).get(kind, ())))

    return StepFacts(
        memories=tuple(Memory(tier=tier) for tier in tiers),
        links=tuple(rates.links(tiers, context.size)),
        world_size=context.size,
        allowed=Allowed(params=on("params"), grads=on("grads"), states=on("optimizer")),
        flops_per_second=rates.flops,
        bytes_per_second=rates.bytes,
        state_types=lambda slot: tuple(adam_states(rest, slot.dtype).values()),
        has_master=lambda slot: rest.master_of(slot.dtype) is not None,
        home=(lambda slot: _known(tiers, placements.of(slot).params)) if allowed is None else (lambda slot: None),
        apart=_apart(context, None if allowed is not None else placements),
        piece_numel=rest.piece_numel,
    )


def _apart(context: Context, decided: Placements | None) -> Callable[[ParameterSlot], Hashable]:
    """Return what differs between parameters with other homes, and where homes are open between small and large ones.

    The small ones may stay on a device while those beside them leave for the host.
    """
    if decided is not None:
        return lambda slot: tuple(getattr(decided.of(slot), kind) for kind in KINDS)
    if not context.link.topology.host_apart:
        return lambda slot: None
    return lambda slot: shard_numel(slot.numel, context.size) <= SMALL_NUMEL


def _known(tiers: Sequence[Tier], tier: Tier) -> Tier:
    """Return a tier, or the device where that is the tier's memory."""
    return tier if tier in tiers else Tier.DEVICE
