"""Graphs of several ranks planned by default within caps of the device, before and after costs are measured.

On one of several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import late
import torch
from capped_run import Run, least_for

import zinf_compile
from zinf_compile.backend import replan

FAR = dict.fromkeys(("params", "grads", "optimizer"), "host")
SIZES: dict[str, Any] = {"bucket": "16KiB", "compute_shape": {"piece_numel": 1 << 14}}


class Planned(NamedTuple):
    """How a model was trained within a cap."""

    planners: set[str]
    cap: int
    peak: int
    left: int
    """Bytes that a forward leaves for its backward."""


def planned_within_caps(rank: int, size: int, name: str, options: dict[str, Any]) -> list[Planned]:
    """Train within some caps; raise where bits differ from those without a cap."""
    expected = _trained(Run(name, SIZES))[1]
    least = least_for(name, {**SIZES, **options})
    found = []
    for part in (0, 2, 16):
        cap = least + least * part // 16
        run = Run(name, {**SIZES, **options, "device_memory": cap})
        with late.delays(0.0005, seed=rank + part):
            peak, values = _trained(run)
        for key, value in values.items():
            assert torch.equal(value, expected[key]), f"{key}, {part} of 16 more"
        context = next(run.model.parameters())._zinf_unit.context  # type: ignore[attr-defined]
        planners = {kept.plan.planner for kept in replan.replanner_of(context)._living()}
        loss = run.call(*run.batch)
        found.append(Planned(planners, cap, peak, context.full_copies.handed_on_bytes))
        loss.backward()
        del run, loss
    assert late.defects() == [], late.defects()
    return found


def _trained(run: Run) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the bytes at the peak, and the parameters: of steps before costs are measured, and behind that."""
    peak = run.peak()
    for _ in range(replan.FIRST + replan.MEASURED):
        run.step()
    return max(peak, run.peak()), zinf_compile.full_state_dict(run.model)


def one_with_larger_batches(rank: int, size: int, name: str, parts: Sequence[int]) -> list[tuple[int, int]]:
    """Let the last rank compile again alone, for twice the batch; return caps that have room for that, and the peaks."""
    least = least_for(name, {**SIZES, **FAR})
    found = []
    for part in parts:
        cap = least + least * part // 16
        run = Run(name, {**SIZES, **FAR, "device_memory": cap})
        with late.delays(0.0005, seed=rank + part):
            run.step()
            if rank == size - 1:
                run.batch = tuple(torch.cat([each, each]) for each in run.batch)
            found.append((cap, run.peak()))
        del run
    assert late.defects() == [], late.defects()
    return found
