"""A plan from a walk: stays for what the walk brings back, stores for what it lets go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.plan import Homes, Kind, Plan, Store, Update
from zinf_compile.plan.problem import StepProblem

from ._build import Stay, build, needs_stays
from ._gaps import SAVED, UNIT, away
from ._walk import Move


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """What `build` needs to know of moves."""

    homes: Homes
    stays: list[Stay]
    saved_stays: list[Stay]
    saved_stores: list[Store]
    resident: tuple[str, ...]

    def plan(
        self,
        problem: StepProblem,
        *,
        planner: str,
        reach: tuple[int, int] = (1, 1),
        updates: tuple[Update, ...] | None = None,
        stays: list[Stay] | None = None,
        buffers: int | None = None,
        done: int = 0,
    ) -> Plan:
        """Return the plan with these moves."""
        plan = build(
            problem,
            self.homes,
            self.stays if stays is None else stays,
            planner=planner,
            saved_stays=self.saved_stays,
            saved_stores=self.saved_stores,
            reach=reach,
            updates=updates,
            buffers=buffers,
            done=done,
        )
        return dataclasses.replace(plan, shared=dataclasses.replace(plan.shared, resident=self.resident))


def moved_by(problem: StepProblem, homes: Homes, all_moves: Iterable[Move], *, far_saved: bool = False) -> Moved:
    """Return what stays and what is stored if everything stays but what is moved; `far_saved` as the gaps were found."""
    count = problem.count
    moves: dict[str, list[Move]] = {}
    for move in all_moves:
        moves.setdefault(move.gap.key, []).append(move)
    stays: list[Stay] = []
    always: list[str] = []
    for unit in problem.units:
        if not unit.uses or not needs_stays(unit, homes.params[unit.name], problem.device):
            continue
        own = sorted(moves.get(UNIT + unit.name, ()), key=lambda move: move.gap.next % count)
        if not own:
            always.append(unit.name)
        for number, move in enumerate(own):
            due = move.gap.next % count
            following = own[(number + 1) % len(own)]
            until = following.gap.last + 1
            until += count if until <= due else 0
            stays.append(Stay(unit.name, move.start - (move.gap.next - due), due, until))
    saved_stays, stores = [], []
    for key, own in moves.items():
        if key.startswith(SAVED):
            (move,), name = own, key.removeprefix(SAVED)
            value = problem.value[name]
            tier = away(problem, value, far=far_saved)
            assert tier is not None
            saved_stays.append(Stay(name, move.start, move.gap.next, value.used_in[-1] + 1))
            for link in problem.hops(problem.device, tier):
                assert link.source is not None
                assert link.destination is not None
                stores.append(Store(Kind.SAVED, name, link.source, link.destination, move.gap.last + 1, move.gone))
    homes = with_params_on(homes, [name for name in always if not problem.unit[name].is_gathered], problem.device)
    resident = tuple(name for name in always if problem.unit[name].is_gathered)
    return Moved(homes, stays, saved_stays, stores, resident)


def with_params_on(homes: Homes, names: list[str], tier: Tier) -> Homes:
    """Return homes with these units' shards on a tier."""
    return dataclasses.replace(homes, params={**homes.params, **dict.fromkeys(names, tier)}) if names else homes
