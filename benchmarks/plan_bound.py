"""How far plans are from the bound and from the exact optimum, for all planners, on generated problems. No step runs.

    python benchmarks/plan_bound.py                       # minutes on two cores
    python benchmarks/plan_bound.py --json plan.json      # keep the numbers
    python benchmarks/plan_bound.py --seeds 2000 2010     # other problems

Ratios are of simulated seconds. One link, frozen units of uneven sizes used forward and backward: 12, 20 and 28 blocks, with
budgets of 15 to 60 % of all bytes; the optimum is that of a mixed-integer programme, on 4 to 8 blocks. Training: 8 blocks, and 32
with two of the seeds, on one to four ranks, all tiers, budgets from a twentieth of what everything takes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from plan_cases import SHARES, read_only, training
from plan_optimum import optimum

from zinf_compile.errors import BudgetError
from zinf_compile.plan.lower_bound import lower_bound
from zinf_compile.plan.planners import PLANNERS
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.simulate import step_seconds
from zinf_compile.plan.verify import check

BLOCKS, SMALL = (12, 20, 28), (4, 6, 8)
STEPS = 8


def problems(seeds: range) -> Iterator[tuple[str, StepProblem, float]]:
    """Yield the group of a problem, the problem, and what its plans are compared with."""
    for seed in seeds:
        for share in SHARES:
            for blocks in BLOCKS:
                problem = read_only(seed, blocks, share)
                twice = problem.room(problem.device) >= 2 * max(unit.stored_bytes for unit in problem.units)
                yield f"one link, budget {'≥' if twice else '<'} 2 units / bound", problem, lower_bound(problem).seconds
        for tiers, world in ((1, 1), (2, 1), (2, 4), (3, 1), (3, 4)):
            for share in (0.05, 0.2, 0.5):
                name = {1: "device, nvme", 2: "device, host", 3: "three tiers"}[tiers]
                for blocks in (8, 32) if seed < seeds.start + 2 else (8,):
                    problem = training(seed, blocks, tiers=tiers, world=world, device=share, host=share)
                    yield f"training, {name}, {world} ranks, {blocks} blocks / bound", problem, lower_bound(problem).seconds


def small(seeds: range, seconds: float) -> Iterator[tuple[str, StepProblem, float]]:
    """Yield small problems with their optimum."""
    for seed in seeds:
        for share in SHARES:
            for blocks in SMALL:
                problem = read_only(seed, blocks, share)
                best, proven = optimum(problem, seconds=seconds)
                done = best <= proven * 1.001
                yield f"{blocks} blocks / optimum{'' if done else ' found in time'}", problem, best


def measure(cases: Iterator[tuple[str, StepProblem, float]]) -> dict[str, dict[str, list[float]]]:
    """Return ratios by group and planner."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group, problem, least in cases:
        for name, planner in PLANNERS.items():
            try:
                plan = planner(problem)
            except BudgetError:
                found[group][name].append(math.inf)
                continue
            check(problem, plan)
            found[group][name].append(step_seconds(problem, plan, steps=STEPS) / least)
    return found


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return mean, 95th percentile and worst."""
    ordered = sorted(values)
    place = min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)
    return {"mean": statistics.mean(ordered), "p95": ordered[place], "worst": ordered[-1], "cases": len(ordered)}


def report(result: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    rows = [
        [group, row["cases"], planner, *(f"{row[key]:.3f}" for key in ("mean", "p95", "worst"))]
        for group, planners in result["groups"].items()
        for planner, row in planners.items()
    ]
    return tabulate(rows, headers=["problems", "cases", "planner", "mean", "p95", "worst"], tablefmt="github")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(1000, 1005), metavar=("FIRST", "END"))
    parser.add_argument("--small-seeds", type=int, nargs=2, default=(1000, 1002), metavar=("FIRST", "END"))
    parser.add_argument("--optimum-seconds", type=float, default=30.0, help="for each optimum")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    groups = measure(problems(range(*options.seeds)))
    groups |= measure(small(range(*options.small_seeds), options.optimum_seconds))
    result = {
        "seeds": list(options.seeds),
        "small_seeds": list(options.small_seeds),
        "seconds": time.monotonic() - began,
        "groups": {
            group: {name: summary(values) for name, values in sorted(rows.items())} for group, rows in sorted(groups.items())
        },
    }
    print(report(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
