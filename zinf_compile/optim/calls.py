"""Which chunks of a step one call of the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch.optim import Optimizer

from zinf_compile.ir.chunk_columns import GRADIENT, VALUE

from .chunks import MASTER, Chunk
from .step_gradient import StepGradient

LEAST_NUMEL, MOST_NUMEL = 16 << 20, 64 << 20
"""Elements that a call updates where they lie ready, at least and at most: what it costs beside arithmetic is little by then."""

CALLS = 6
"""Calls of a step, about, where that is between the two: the next forward waits for one at a time."""


def call_numel(total: int) -> int:
    """Return how many elements that lie ready a call updates, in a step of `total` elements."""
    return max(LEAST_NUMEL, min(MOST_NUMEL, total // CALLS))


def group_calls(due: Sequence[int], numel_of: Callable[[int], int], is_ready: Callable[[int], bool]) -> list[list[int]]:
    """Group chunks, by number and in order, into calls.

    Those that nothing has to be loaded for, and that follow each other, are updated together, up to `call_numel`. All
    others are alone, and so are the first one and the last one, of which the caller's own step updates one.
    """
    calls: list[list[int]] = []
    most, room = call_numel(sum(map(numel_of, due))), 0
    for place, number in enumerate(due):
        numel = numel_of(number)
        joins = place not in (0, len(due) - 1) and is_ready(number)
        if not joins or numel > room:
            calls.append([])
            room = most if joins else 0
        calls[-1].append(number)
        room -= numel
    return calls


def lies_ready(chunk: Chunk, gradients: Iterable[StepGradient], *, device_apart: bool) -> bool:
    """Say whether all that a chunk's update reads and changes is in the memory where it is updated.

    `gradients`: those that are due; `device_apart`: they are applied in the memory of a device that has its own.
    """
    if any(column.host or column.device for name, column in chunk.columns.items() if name != GRADIENT):
        return False
    here = chunk.columns[GRADIENT]
    return not (here.host or here.device) or (not device_apart and all(gradient.is_on_host for gradient in gradients))


def makes_no_copy(chunk: Chunk, optimizer: Optimizer) -> bool:
    """Say whether an update takes no memory that grows with the elements that are updated together.

    Gradients of another type are converted for it, and implementations with `foreach` compute with whole copies.
    """
    updated = chunk.columns.get(MASTER, chunk.columns[VALUE]).dtype
    return chunk.columns[GRADIENT].dtype == updated and not any(group.get("foreach") for group in optimizer.param_groups)
