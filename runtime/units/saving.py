"""A save in the background, as those see it who change what it has still to write.

Note: Pieces that are about to change
    A save returns before all is written. Its thread writes the rest piece by piece, from where it lives. Whoever is about to
    change something calls `before_change` first: what is not written yet is then written by the caller, from where it is or from
    the memory in which the caller has it, and nobody reads it from a drive a second time. Nothing is copied to wait for the drive
    but what is in the save's staging buffers: the caller waits for one of these, and first until the save has its space. Errors
    stay with the save.

Note: Pieces that a deferred step has still to update
    A save that begins while a deferred step is under way has the values after that step. What that step hasn't updated by then
    comes from it: it calls `updated` with its own buffers, before it tells anyone else. The save's thread leaves these alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol

import torch


class ShardsSave(Protocol):
    """Pieces that are to be written. An owner is a `Unit`, or a chunk of states."""

    def before_change(
        self, owner: Hashable, start: int, end: int, columns: Mapping[str, torch.Tensor] | None = None, first: int = 0
    ) -> None:
        """Return once the elements [start, end) of an owner may change: what the save needs of them is written, or copied.

        `columns`, in host memory: their values, from element `first` on, so that they needn't be read. Any thread may call.
        """

    def updated(self, owner: Hashable, start: int, end: int, columns: Mapping[str, torch.Tensor], first: int = 0) -> None:
        """Write the elements [start, end) of an owner, for which the save waits: a deferred step has updated them.

        `columns`, in host memory: their values, from element `first` on. Called on the thread that updates.
        """

    def expect(self, caller: Hashable, owners: Iterable[Hashable]) -> None:
        """Let the save leave these owners to `caller`, who will call `before_change` for each of them; none: no longer."""
