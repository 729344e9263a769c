"""What was decided for the parameters of a graph, as text: for the log at the first step, and for dumps."""

from __future__ import annotations

from collections.abc import Sequence

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.lower_bound import lower_bound
from zinf_compile.plan.occupancy import occupied
from zinf_compile.plan.plan import Homes, Plan
from zinf_compile.plan.planners._build import ahead_by, build
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import simulate
from zinf_compile.plan.table import shares_line

LARGE = 1500
"""Regions, units and pieces of a problem for which a bound is not worth the time that it takes to find."""


def tell_homes(problem: StepProblem, homes: Homes, used: Sequence[tuple[Tier, int, int]], *, parameters: int, ranks: int) -> str:
    """Return two lines: seconds, the bound and what sets it, bytes of memories of (tier, bytes, cap); and the share by tier.

    Seconds are those of transfers started one use ahead at rough rates, and the bound is that of the same memory.
    """
    plan = _as_it_runs(problem, homes)
    step = f"step {simulate(problem, plan).seconds:.3g} s"
    if len(problem.regions) + len(problem.units) + len(problem.pieces) <= LARGE:
        most = {str(tier): int(held.max()) for tier, held in occupied(problem, plan).items() if tier.in_memory}
        bound = lower_bound(problem.with_budgets(**most))
        step += f" (bound {bound.seconds:.3g} s, by {bound.by})"
    memories = [f"{tier} {_size(count)} of {_size(cap)}" for tier, count, cap in used]
    counted = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"
    head = f"plan for {counted} parameters, {ranks} rank{'s' if ranks > 1 else ''}: {', '.join([step, *memories])}"
    return f"{head}\n  {shares_line(problem, homes)}"


def _as_it_runs(problem: StepProblem, homes: Homes) -> Plan:
    return build(problem, homes, ahead_by(problem, homes, {}), planner="just_in_time")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**28 else f"{count:,} bytes"
