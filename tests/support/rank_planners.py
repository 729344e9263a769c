"""Training under each planner, on one rank or several, against training without one."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rank_tiers import _check, _prepare, _train
from tiers import Meter, Placement, options_for

import zinf_compile
from zinf_compile.backend.replan import FIRST, MEASURED, replanner_of
from zinf_compile.plan.plan import Plan
from zinf_compile.plan.planners import greedy, just_in_time
from zinf_compile.plan.planners._build import Stay, ahead_by, build, farthest, needs_stays, shortage
from zinf_compile.plan.problem import StepProblem
from zinf_compile.runtime import context
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.storage.engine import Engine


class _Numbers(Protocol):
    def below(self, count: int, /) -> int:
        """Return a number from 0 to `count` - 1."""


class _FromSeed:
    def __init__(self, seed: int) -> None:
        self._numbers = random.Random(seed)

    def below(self, count: int) -> int:
        return self._numbers.randrange(count)


def drawn(seed: int) -> Callable[[StepProblem], Plan]:
    """Return a planner that draws plans from a seed, the same one for the same problem."""

    def draw(problem: StepProblem) -> Plan:
        return drawn_plan(_FromSeed(seed))(problem)

    return draw


def drawn_plan(numbers: _Numbers) -> Callable[[StepProblem], Plan]:
    """Return a planner that keeps units between any uses and starts transfers at any boundaries, as numbers say."""

    def draw(problem: StepProblem) -> Plan:
        homes = farthest(problem)
        stays: list[Stay] = []
        for unit in problem.units:
            if not needs_stays(unit, homes.params[unit.name], problem.device):
                continue
            free = 0
            for use in unit.uses:
                if stays and stays[-1].name == unit.name and (stays[-1].until == use or numbers.below(2)):
                    stays[-1] = Stay(unit.name, stays[-1].start, stays[-1].due, use + 1)
                else:
                    stays.append(Stay(unit.name, use - numbers.below(use - free + 1), use, use + 1))
                free = use + 1
        plan = build(problem, homes, stays, planner="drawn")
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


class _Chain(torch.nn.Module):
    """Weights of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def wary(problem: StepProblem) -> Plan:
    """Fetch just in time from a drive that is thought to be fast, and else as early as memory allows."""
    (rate,) = {link.bytes_per_second for link in problem.links if link.name == "nvme to host"}
    return just_in_time(problem) if rate > 1e9 else greedy(problem)


def train_on_a_slow_drive(rank: int, size: int, folder: str, planned: bool) -> tuple[list[float], list[str], list[str], str, int]:
    """Train on a drive of 100 MB/s; return losses, what was said of plans, the collectives of the last graphs, and a page.

    And the bytes that the last forward has left for its backward.
    """
    context.Engine = functools.partial(Engine, bandwidth=1e8)  # type: ignore[misc,assignment]
    try:
        torch.manual_seed(0)
        model = _Chain()
        options = {"compute": "fx", "params": "nvme", "nvme": folder, "planner": wary if planned else None, "bucket": "4MiB"}
        model.compile(backend="zero_infinity", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        losses = []
        for step in range(FIRST + MEASURED + 2):
            if step == FIRST + MEASURED:
                zinf_compile.timeline(model, f"{folder}/step.html")
            loss = model(torch.full((1024, 1024), 0.01 * (1 + rank)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        own = next(model.parameters())._zinf_unit.context  # type: ignore[attr-defined]
        replanner = replanner_of(own)
        programs = [kept.live.program for kept in replanner._living() if kept.live is not None]
        name = f"{folder}/step.html" if rank == 0 else f"{folder}/step.rank{rank}.html"
        model(torch.full((1024, 1024), 0.01))
        sequence, left = [line for p in programs for line in p.sequence], own.full_copies.handed_on_bytes
        return losses, replanner.changes, sequence, Path(name).read_text(), left
    finally:
        context.Engine = Engine
