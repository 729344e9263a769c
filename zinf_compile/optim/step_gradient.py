"""Snapshot of a gradient at `optimizer.step()`: a deferred step reads it, so later changes of `parameter.grad` don't reach it."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from zinf_compile._torch import no_torch_function
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter

from .shard_state import local_gradient


class StepGradient:
    """Snapshot of one parameter's gradient for a step."""

    def __init__(self, parameter: ShardedParameter, pieces: int) -> None:
        grad = parameter.grad
        offloaded = grad.offloaded if isinstance(grad, ShardedGradient) else None
        self._parameter: ShardedParameter | None = parameter if offloaded is None else None
        self._local: torch.Tensor | None = None
        self.offloaded = offloaded
        """The offloaded gradient; None if it is on the device."""
        self.changes = offloaded.noted() if offloaded is not None and offloaded.backing.resident is None else None
        """Function to apply to each piece after it was read: pending scalings. None for gradients in memory."""
        self.pieces_left = pieces
        """Pieces not applied yet."""

    @property
    def is_snapshot(self) -> bool:
        """Whether later changes of `parameter.grad` don't reach it."""
        return self.changes is not None

    def local(self) -> torch.Tensor:
        """Return the shard of a gradient on the device; waits for its reduction."""
        if self._local is None:
            assert self._parameter is not None, "not an offloaded gradient"
            self._local = local_gradient(self._parameter)
        assert self._local is not None, "the parameter had a gradient at the snapshot"
        return self._local


def mark_applied(optimizer: Optimizer) -> None:
    """Note, after a step, that it has applied the gradients as they are."""
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        with no_torch_function():
            grad = parameter.grad
        if grad is not None:
            grad._zinf_applied = grad._version


def is_applied(grad: torch.Tensor) -> bool:
    """Say whether a step has applied a gradient, to which nothing was added since."""
    version: int | None = getattr(grad, "_zinf_applied", None)
    return version == grad._version
