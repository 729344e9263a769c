"""Deferred steps that are under way when a save begins: it takes from them what they have still to make, and waits for none.

Called by `save` and `background`; see Note: Pieces that a deferred step has still to update.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.optim.deferred_step import DeferredStep, finish_deferred
from zinf_compile.optim.offloaded_states import OffloadedStates
from zinf_compile.optim.record import record_of
from zinf_compile.optim.state_pieces import small_states
from zinf_compile.optim.step_saves import Groups
from zinf_compile.runtime.units.unit import Unit

from .saved_pieces import SavedPiece, SavedPieces

Describe = Callable[[Groups, Mapping[torch.Tensor, Mapping[str, Any]]], Sequence[SavedPiece]]
"""Describes an optimizer by its groups and small states; returns the pieces of the tensors among them."""


class StepEndedError(CheckpointError):
    """A deferred step has failed, whose values were to be saved."""

    def __init__(self, step: DeferredStep) -> None:
        super().__init__("the step before it failed while it was saved")
        self.step = step


class SavedStep:
    """One of them, of one optimizer, as `StepSave`."""

    def __init__(self, optimizer: Optimizer, step: DeferredStep, updating: Sequence[OffloadedStates]) -> None:
        self._optimizer, self._step = optimizer, step
        self.updating = updating
        """The states that it may still update."""
        self.describe: Describe | None = None
        """For an optimizer that is saved; others update parameters that are."""
        self._pieces: SavedPieces | None = None

    @property
    def pieces(self) -> SavedPieces:
        """See `StepSave.pieces`."""
        assert self._pieces is not None, "it has begun"
        return self._pieces

    def updates(self, unit: Unit) -> bool:
        """Return whether it may still update a unit."""
        return unit.updates is not None and unit.updates is self._step.updates

    def begin(self, pieces: SavedPieces) -> None:
        """Let it write those of the pieces that it has still to update; others change after `before_change` only."""
        self._pieces = pieces
        self._step.let_save(self, self._optimizer)

    def await_updates(self, due: Iterable[tuple[Hashable, int, int]]) -> None:
        """See `StepSave.await_updates`."""
        self.pieces.await_updates(self, due)

    def step_ended(self, groups: Groups) -> None:
        """See `StepSave.step_ended`."""
        try:
            small = small_states(self.updating)
            self.pieces.end_step(self, [] if self.describe is None else self.describe(groups, small))
        except Exception as error:
            self.pieces.fail(error)

    def step_failed(self) -> None:
        """See `StepSave.step_failed`."""
        self.pieces.fail(StepEndedError(self._step))


def step_to_save(optimizer: Optimizer) -> SavedStep | None:
    """Return the deferred step of an optimizer that is under way, to be saved as it will be; None where there is none.

    Where a save can't take it, as after states were replaced, it is finished first. Raises `StepFailedError` where it has failed.
    """
    step: DeferredStep | None = record_of(optimizer).deferred
    updating = [] if step is None else step.being_saved(optimizer)
    if step is None or not updating:
        finish_deferred(optimizer)
        return None
    return SavedStep(optimizer, step, updating)
