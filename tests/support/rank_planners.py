"""Training under each planner, on one rank or several, against training without one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rank_tiers import _check, _prepare, _train
from tiers import Meter, Placement, options_for

from zinf_compile.plan.plan import Plan
from zinf_compile.plan.planners._build import Stay, ahead_by, build, farthest, needs_stays, shortage
from zinf_compile.plan.problem import StepProblem
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating


def drawn(seed: int) -> Callable[[StepProblem], Plan]:
    """Return a planner that keeps units between any uses and starts transfers at any boundaries, drawn from a seed."""

    def draw(problem: StepProblem) -> Plan:
        numbers = random.Random(seed)
        homes = farthest(problem)
        stays: list[Stay] = []
        for unit in problem.units:
            if not needs_stays(unit, homes.params[unit.name], problem.device):
                continue
            free = 0
            for use in unit.uses:
                if stays and stays[-1].name == unit.name and (stays[-1].until == use or numbers.random() < 0.5):
                    stays[-1] = Stay(unit.name, stays[-1].start, stays[-1].due, use + 1)
                else:
                    stays.append(Stay(unit.name, numbers.randint(free, use), use, use + 1))
                free = use + 1
        plan = build(problem, homes, stays, planner=f"drawn {seed}")
        return plan if not shortage(problem, plan) else build(problem, homes, ahead_by(problem, homes, {}), planner="late")

    return draw


def train_under_planners(
    rank: int,
    size: int,
    folder: str,
    dtype: torch.dtype,
    compute: str,
    steps: int,
    planners: Sequence[str | int],
    placements: Sequence[Placement],
    bucket: int,
    apart: bool,
    given: dict[str, Any] | None = None,
) -> int:
    """Train with each planner, or the one of a seed, at each placement; return the number of runs.

    Raises where one has other bits than without a planner and with all on the device.
    """
    _prepare()
    others = {"compute": compute, "bucket": bucket, **(given or {})}
    expected = _train(rank, others, Meter(None), None, dtype, steps)
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext() as simulated:
        for placement in placements:
            for planner in planners:
                chosen = planner if isinstance(planner, str) else drawn(planner)
                options = options_for(placement, folder, planner=chosen, **others)
                _check(placement, f"planner {planner}", _train(rank, options, Meter(simulated), None, dtype, steps), expected)
    return len(placements) * len(planners)
