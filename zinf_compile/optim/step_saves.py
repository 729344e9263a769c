"""Saves that begin while a deferred step is under way: what it has still to make, they take from it as it is made.

Called by `deferred_step`, on the thread that updates, and by `checkpoint`, which begins them; knows no chunks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.system.accelerator import current_stream
from zinf_compile.runtime.units.saving import ShardsSave

Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer."""


class StepSave(Protocol):
    """A save that takes what a deferred step has still to make. Nothing here raises: errors stay with the save."""

    @property
    def pieces(self) -> ShardsSave:
        """What is given the elements that are updated."""

    def await_updates(self, due: Iterable[tuple[Hashable, int, int]]) -> None:
        """Leave to the step, until it ends or fails, the elements [start, end) of owners that it has still to update."""

    def step_ended(self, groups: Groups) -> None:
        """Take small states as they are committed, and these groups, copies with the settings after the step."""

    def step_failed(self) -> None:
        """Fail: what the step has still to update will never come."""


@dataclasses.dataclass(frozen=True)
class _Taking:
    save: StepSave
    groups: Groups
    """Copies of the optimizer's groups as they were when the save began."""
    issued: torch.Event | None
    """What their tensors come after."""


class StepSaves:
    """Those of one step. For each of them a chunk is updated when it begins, or handed over later: never both, never neither."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._takings: list[_Taking] = []
        self._has_failed = False
        self.is_over = False
        """Nothing is left to be made."""

    def begin(
        self, save: StepSave, optimizer: Optimizer, device: torch.device, due: Callable[[], Iterable[tuple[Hashable, int, int]]]
    ) -> None:
        """Let a save take what is `due` now; where the step is over, and nothing has changed since, tell it so at once."""
        with self._lock:
            if not self.is_over:
                issued = current_stream(device)
                event = None if issued is None else issued.record_event()
                self._takings.append(_Taking(save, _copied(optimizer.param_groups), event))
                save.await_updates(due())
                return
        if self._has_failed:
            save.step_failed()
        else:
            save.step_ended(_copied(optimizer.param_groups))

    @contextlib.contextmanager
    def reporting(self) -> Iterator[list[ShardsSave]]:
        """Context in which a chunk is reported as updated, after it was handed to what this gives; no save begins meanwhile."""
        with self._lock:
            yield [taking.save.pieces for taking in self._takings]

    def end(self, merge: Callable[[Groups], None], device: torch.device) -> None:
        """Tell that the step is over and committed. `merge` sets settings that it has changed."""
        stream = current_stream(device)
        for taking in self._close():
            if taking.issued is not None and stream is not None:
                stream.wait_event(taking.issued)
            merge(taking.groups)
            taking.save.step_ended(taking.groups)

    def fail(self) -> None:
        """Tell that the step has failed."""
        self._has_failed = True
        for taking in self._close():
            taking.save.step_failed()

    def abandon(self) -> None:
        """Let go of everything in a forked process, where the thread that updates doesn't exist."""
        self._lock, self._takings, self.is_over = threading.RLock(), [], True

    def _close(self) -> Sequence[_Taking]:
        with self._lock:
            self.is_over = True
            takings, self._takings = self._takings, []
            return takings


def copied(value: Any) -> Any:
    """Return a copy of a setting."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _copied(groups: Sequence[dict[str, Any]]) -> Groups:
    return [{name: copied(value) for name, value in group.items()} for group in groups]
