"""What steps on the device make: waits of the host, and allocations. On one rank or several."""

from __future__ import annotations

import late
import torch
from late_training import Options, Training

import zinf_compile


def waits_of_compute() -> int:
    """Return how often threads that issue compute have waited for the device."""
    return sum(count for thread, count in late.waits_by_thread().items() if not thread.startswith("zinf"))


def waits_on_ranks(rank: int, size: int, options: Options, layers: int, micro_batches: int) -> int:
    """Return the waits of a step after two others, in a model of time; states on drives aside."""
    training = Training("late", options, layers=layers, rank=rank)
    with late.durations({}, otherwise=1.0):
        for step in range(3):
            batches = training.batches(step, micro_batches)
            late.clear()
            training.step(batches, clipped=micro_batches > 1)
    return waits_of_compute()


def allocations_of_steps(rank: int, size: int, options: Options, steps: int = 24) -> list[int]:
    """Return how often memory of the device was allocated in each of some steps."""
    torch.compiler.reset()
    zinf_compile.reset()
    training, found = Training("late", {"bucket": "16KiB", **options}, rank=rank), []
    for step in range(steps):
        before = late.account().allocations
        training.step(training.batches(step, 1), clipped=False)
        torch.accelerator.synchronize()
        found.append(late.account().allocations - before)
    return found
