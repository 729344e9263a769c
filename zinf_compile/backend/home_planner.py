"""Decides the homes of the parameters of one captured graph, once its forward and backward are known, from the caps.

`GraphCompiler` calls it before the schedule is written; `fill_homes` chooses, by the account of memory of the graph's budget.
Rank 0 chooses for all ranks: shards are alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from zinf_compile.config import Config
from zinf_compile.ir.placements import KINDS, Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.plan.fill_together import fill_together
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.planners._build import farthest
from zinf_compile.plan.rates import Rates
from zinf_compile.plan.saved_homes import Saving
from zinf_compile.runtime.context import Context
from zinf_compile.sharded.allowed_homes import allowed_homes
from zinf_compile.sharded.fit import Fit
from zinf_compile.sharded.homes_ahead import fits_near
from zinf_compile.sharded.other_graphs import unseen_parameters

from .step_account import StepAccount
from .tell_homes import tell_homes


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
        self._config, self._context, self._slots = config, context, slots
        self.paths = placements
        """Placements that the graph's transfers are for: those decided, or farther ones where other parameters look alike."""
        self.told: Callable[..., str] = str
        """Returns the plan as text, given what `tell_homes` takes beside."""
        self.all_near = False
        """Whether everything was decided to live on the device, and has room there."""
        self._placements = placements
        self.unseen = unseen_parameters(inputs[slot.index] for slot in slots)
        """Parameters that no graph has seen yet."""
        self.together = together and context.size > 1
        """Whether several ranks decide at the same point."""
        self._allowed = allowed_homes(config, context.link.topology)
        self._made: dict[Hashable, Placement] = {}

    def likely(self) -> Placements:
        """Return the placements by which ways to transfer are chosen before homes are decided. Collective, as `decide`."""
        fresh = [slot for slot in self._slots if slot.index not in self._placements.own]
        near = fits_near(self._config, [*fresh, *self.unseen], self._context, together=self.together)
        return Placements(self._config.placement(), self._placements.own) if near else self._placements

    def decide(self, account: StepAccount, fit_of: Callable[[Saving], Fit], savings: Sequence[Saving]) -> Placements:
        """Return the placements of all parameters, by what fits beside one of the choices for saved values.

        `account`: of the graphs; its homes are those decided from then on. `fit_of` a choice: its account of memory. Collective
        where ranks plan together.
        """
        problem = account.problem
        homes = farthest(problem)  # of a rank that compiles alone: as others may have it
        if self._context.size == 1 or self.together:
            filled, _ = fill_together(
                problem,
                savings,
                lambda homes, saving: fit_of(saving).excess(self._placed(homes, account), saving.moving),
                at_least=lambda homes, saving: fit_of(saving).at_least(self._placed(homes, account), saving.moving),
            )
            homes, self.all_near = filled.homes, filled.excess.fits and filled.homes == account.nearest
        if self.together:
            homes = self._context.ranks.share(homes, what="sharing homes")
        account.homes = homes
        found = self._placed(homes, account)
        self.paths = self._for_others(found)
        count = sum(slot.numel for slot in self._slots)
        self.told = partial(tell_homes, problem, homes, parameters=count, ranks=self._context.size)
        return found

    def _for_others(self, found: Placements) -> Placements:
        """Return the placements that paths of transfers are laid for: other parameters may come in the place of these."""
        alike = {(slot.shape, slot.dtype) for slot in self.unseen}
        own = dict(found.own)
        for slot in self._slots:
            if (slot.shape, slot.dtype) in alike:
                homes = own.get(slot.index, found.rest), found.rest
                farther: dict[str, Any] = {kind: max((getattr(h, kind) for h in homes), key=_distance) for kind in KINDS}
                own[slot.index] = dataclasses.replace(found.rest, **farther)
        return Placements(found.rest, own)

    def _placed(self, homes: Homes, account: StepAccount) -> Placements:
        """Return the placements of these homes; what no compute uses is near where all else is, else as far as is allowed."""
        members, own = account.members, dict(self._placements.own)
        if homes == account.nearest:
            placement = self._with_tiers({kind: tiers[0] for kind, tiers in self._allowed.items() if len(tiers) > 1})
            own |= {slot.index: placement for slot in self._slots if slot.index not in own}
        states: dict[str, Tier] = {}
        for piece, tier in homes.states.items():
            states.setdefault(piece.rpartition(" #")[0] or piece, tier)
        for name, slots in members.items():
            tiers = {"params": homes.params.get(name), "grads": homes.grads.get(name), "optimizer": states.get(name)}
            for slot in slots:
                given: dict[str, Any] = {}
                for kind, (nearest, *others) in self._allowed.items():
                    if others:  # there is a choice; what isn't trained has no gradients and no states
                        given[kind] = (
                            (tiers[kind] or getattr(self._placements.rest, kind))
                            if slot.requires_grad or kind == "params"
                            else nearest
                        )
                if slot.index not in self._placements.own:
                    own[slot.index] = self._with_tiers(given)
        return Placements(self._placements.rest, own)

    def _with_tiers(self, tiers: Mapping[str, Tier]) -> Placement:
        """Return the placement of the rest with other tiers: many parameters have the same, at many homes that are tried."""
        key = tuple(tiers.items())
        if key not in self._made:
            self._made[key] = dataclasses.replace(self._placements.rest, **tiers)  # type: ignore[arg-type]
        return self._made[key]

    def account(self, scheduled: Sequence[fx.Graph], rates: Rates) -> StepAccount:
        """Return what a step of the graphs takes, wherever the parameters may live; they have gathers just in time."""
        return StepAccount(scheduled, self._context, self._placements, rates, self._allowed)


def _distance(tier: Tier) -> int:
    return tier.distance
