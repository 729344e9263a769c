"""What goes on at the same time in a step, by the streams' own logs in a model of time."""

from __future__ import annotations

import late
import torch
from late_training import Options, Training

import zinf_compile

SECONDS = {
    "copy to device": 1.0,
    "copy to host": 1.0,
    "all_gather_into_tensor": 1.0,
    "reduce_scatter_tensor": 1.0,
    "aten::addmm.out": 4.0,
    "aten::mm.out": 4.0,
}
"""Of the model; all else takes no time. A layer of a forward computes for 8 s, and its parameters come in 4 s."""
COMPUTE = ("aten::addmm.out", "aten::mm.out")
LAYERS = 6

Span = tuple[float, float]


def spans_of_a_step(rank: int, size: int, options: Options) -> dict[str, list[Span]]:
    """Return the times of all works of each kind in a step, in their order."""
    torch.compiler.reset()
    zinf_compile.reset()
    training = Training("late", {"bucket": "16KiB", **options}, layers=LAYERS, rank=rank)
    training.step(training.batches(0, 1), clipped=False)
    batches = training.batches(1, 1)
    torch.accelerator.synchronize()
    late.clear()
    with late.durations(SECONDS):
        training.step(batches, clipped=False)
        torch.accelerator.synchronize()
    found: dict[str, list[Span]] = {name: [] for name in SECONDS}
    for log in late.logs().values():
        for work in log:
            if work.name in found:
                found[work.name].append((work.start, work.end))
    return {name: sorted(spans) for name, spans in found.items()}


def overlapped_s(some: list[Span], others: list[Span]) -> float:
    """Return how many seconds of some spans lie within others, none of which overlap with each other."""
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in some for begin, stop in others)


def total_s(spans: list[Span]) -> float:
    """Return their seconds, all together."""
    return sum(end - start for start, end in spans)
