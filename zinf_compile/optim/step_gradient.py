"""Snapshot of a gradient at `optimizer.step()`: a deferred step reads it, so later changes of `parameter.grad` don't reach it."""

from __future__ import annotations

import torch

from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.parameter import ShardedParameter

from .shard_state import local_gradient


class StepGradient:
    """What a step needs of one parameter's gradient."""

    def __init__(self, parameter: ShardedParameter, pieces: int) -> None:
        grad = parameter.grad
        away = grad.away if isinstance(grad, ShardedGradient) else None
        self._parameter: ShardedParameter | None = parameter if away is None else None
        self._local: torch.Tensor | None = None
        self.away = away
        """The shard, where it isn't on the device."""
        self.changes = away.noted() if away is not None and away.backing.resident is None else None
        """What to do to each piece of it that was read."""
        self.pieces_left = pieces
        """Pieces that are still to be applied."""

    @property
    def waits_on_drive(self) -> bool:
        """Whether it stays as it is, whatever is done to `parameter.grad`."""
        return self.changes is not None

    def local(self) -> torch.Tensor:
        """Return the shard, where it is on the device; waits for its reduction."""
        if self._local is None:
            assert self._parameter is not None, "it is away"
            self._local = local_gradient(self._parameter)
        assert self._local is not None, "there was one when it was taken"
        return self._local
