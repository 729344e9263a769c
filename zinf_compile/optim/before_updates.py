"""What has to happen before the first update of an optimizer, on all ranks; `checkpoint` adds the dry run of a save.

Called by `step_hooks`. An error of it is that of the step, which has changed nothing then, and the next step tries again.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from .record import record_of

_preparations: list[Callable[[Optimizer], None]] = []


def before_updates(prepare: Callable[[Optimizer], None]) -> None:
    """Have `prepare` called with each optimizer before its first update."""
    _preparations.append(prepare)


def prepare_updates(optimizer: Optimizer) -> None:
    """Call what there is to call, unless it was called for this optimizer."""
    record = record_of(optimizer)
    if not record.rehearsed:
        for prepare in _preparations:
            prepare(optimizer)
        record.rehearsed = True
