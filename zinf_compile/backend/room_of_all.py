"""The room that all ranks have for a graph they plan together, region by region.

Note: other batches
    A rank that compiles the graph again alone, for another batch, follows the plan. Where compute takes more for that, it does so
    most in the region that had most: units that fit into what another region left of it fit beside the larger batch, too, as
    long as the region with most has the room that it had. `hold_back` is for where it hasn't.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from zinf_compile.plan.problem import StepProblem
from zinf_compile.runtime.comm.ranks import Ranks


def room_of_all(problem: StepProblem, ranks: Ranks) -> StepProblem:
    """Return a rank's problem with the least room of all ranks: on each tier, and on the device in each region. Collective.

    Where ranks have other numbers of regions, which a legal schedule doesn't, the device has the least of all regions.
    """
    budgets: dict[str, int | None] = {}
    for memory in problem.memories:
        least = min(ranks.agree(["room for a plan"], what="exchanging room for a plan", value=_as_number(memory.bytes)))
        budgets[memory.tier] = None if math.isinf(least) else int(least)
    room = budgets[problem.device]
    if room is None:
        return problem.with_budgets(**budgets)
    mine = [problem.room(problem.device) - region.workspace_bytes for region in problem.regions]
    counts = ranks.agree(["regions of a graph"], what="exchanging regions of a graph", value=float(len(mine)))
    if len(set(counts)) > 1:
        mine = [min(mine, default=math.inf)]
    found = ranks.exchange(torch.tensor(mine, dtype=torch.float64), what="room of regions").amin(0).tolist() if mine else []
    free = found if len(found) == problem.count else found * problem.count
    most = max(free, default=float(room))
    if math.isinf(most):
        return problem.with_budgets(**budgets)
    regions = (
        dataclasses.replace(region, workspace_bytes=int(most - each)) for region, each in zip(problem.regions, free, strict=True)
    )
    budgets[problem.device] = int(most)
    return dataclasses.replace(problem, regions=tuple(regions)).with_budgets(**budgets)


def _as_number(count: int | None) -> float:
    return math.inf if count is None else float(count)
