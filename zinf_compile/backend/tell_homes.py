"""What was decided for the parameters of a graph, as text: for the log at the first step, and for dumps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence

from zinf_compile.errors import BudgetError, PlanError
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.lower_bound import BUSY_CELLS, lower_bound
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Homes, Plan
from zinf_compile.plan.planners._build import ahead_by, build
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import simulate
from zinf_compile.plan.table import shares_line

_NO_CAP = sys.maxsize
"""What a dump without a cap plans for."""

LARGE = 1500
"""Regions, units and pieces of a problem for which a bound is not worth the time that it takes to find."""


def tell_homes(
    problem: StepProblem,
    homes: Homes,
    used: Sequence[tuple[Tier, int, int]],
    saved: str = "",
    *,
    parameters: int,
    ranks: int,
) -> str:
    """Return two lines: seconds, the bound and what sets it, bytes of memories of (tier, bytes, cap); and the share by tier.

    `saved`: what was decided for saved values. Seconds are those of transfers started one use ahead at rough rates, and the bound
    is that of the same memory; both without saved values.
    """
    plan = _as_it_runs(problem, homes)
    step = f"step {simulate(problem, plan).seconds:.3g} s"
    if len(problem.regions) + len(problem.units) + len(problem.pieces) <= LARGE:
        most = {str(tier): int(held.max()) for tier, held in occupied(problem, plan).items() if tier.in_memory}
        with contextlib.suppress(PlanError, BudgetError):  # a line of a log ends no run
            bound = lower_bound(problem.with_budgets(**most), cells=BUSY_CELLS, idle_links=True)
            step += f" (bound {bound.seconds:.3g} s, by {bound.by})"
    counted = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
    head = f"plan for {counted} parameters, {ranks} rank{'s' if ranks > 1 else ''}: {', '.join([step, *_memories(used)])}"
    return f"{head}\n  {'     '.join(filter(None, [shares_line(problem, homes), saved]))}"


def tell_saved(found: Mapping[str, int], *, used: Sequence[tuple[Tier, int, int]] = (), kept: str = "") -> str:
    """Return the share of saved values by what becomes of them, given their bytes; empty where nothing is saved.

    `used`: memories of (tier, bytes, cap), for a line of their own in front where nothing else was decided. `kept`: what was
    decided for gathered units.
    """
    total = sum(found.values())
    shares = ", ".join(f"{word} {count / total:.0%}" for word, count in found.items() if count)
    text = f"activations  {shares}" if shares else ""
    text = "     ".join(filter(None, [text, kept]))
    return f"plan for activations of {_size(total)}: {', '.join(_memories(used))}\n  {text}" if used else text


def bytes_by_choice(
    memories: Sequence[SavedMemory], moving: Sequence[SavedMemory], dropped: Collection[str] = ()
) -> dict[str, int]:
    """Return the bytes of saved values by what becomes of them: "keep", the tier that they move to, or "recompute".

    `dropped`: names of values that are made again; of a memory all are, or none.
    """
    found: dict[str, int] = {"keep": 0}
    tiers = {memory.name: str(memory.tier) for memory in moving}
    for memory in memories:
        word = "recompute" if dropped and set(memory.inputs) <= set(dropped) else tiers.get(memory.name, "keep")
        found[word] = found.get(word, 0) + memory.bytes
    return found


def _memories(used: Sequence[tuple[Tier, int, int]]) -> list[str]:
    return [f"{tier} {_size(count)}" + (f" of {_size(cap)}" if cap < _NO_CAP else "") for tier, count, cap in used]


def _as_it_runs(problem: StepProblem, homes: Homes) -> Plan:
    return build(problem, homes, ahead_by(problem, homes, {}), planner="just_in_time")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**28 else f"{count:,} bytes"
