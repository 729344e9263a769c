"""What a step has still to do to a unit, and whether the unit's values are all of one step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zinf_compile.errors import StepFailedError, StoreError
from zinf_compile.runtime.transfer.move import Location, move, on_host, route_of

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context
    from zinf_compile.runtime.lanes.lanes import Pending

    from .pending_updates import Updates

T = TypeVar("T")


class Updatable:
    """The part of a `Unit` that knows this. A change that ends in its middle marks the values incomplete until all are new."""

    context: Context
    serial: int
    parameter: weakref.ref[torch.Tensor]
    updates: Updates[Any] | None
    dtype: torch.dtype

    @property
    def shard_numel(self) -> int:
        """See `Unit.shard_numel`."""
        raise NotImplementedError

    def location(self) -> Location:
        """See `Unit.location`."""
        raise NotImplementedError

    @property
    def at_hand(self) -> bool:
        """See `Unit.at_hand`."""
        raise NotImplementedError

    @property
    def unfinished(self) -> Updates[Any] | None:
        """The step that may still update the shard, or has failed to; None where the last one is over."""
        return None if self.updates is None or self.updates.is_over else self.updates

    def wait_updated(self) -> None:
        """Wait until no step has to update the shard; raise where one failed."""
        if (updates := self.unfinished) is not None:
            updates.wait(self)

    def wait_arrived(self) -> None:
        """Wait for copies of what a step has updated to where the shard lives in memory; not for what it has still to update."""
        if (updates := self.unfinished) is not None:
            updates.wait_arrived(self)

    def updated(self, first: int = 0, last: int | None = None) -> Pending | None:
        """Return what readers of elements [first, last) in memory come after: a step that may still update them, if any."""
        return None if (updates := self.unfinished) is None else updates.arrival(self, first, last)

    def begin_updated(self, begin: Callable[[], Pending], first: int = 0, last: int = sys.maxsize) -> Pending:
        """Begin a transfer that reads elements [first, last) in memory once they are updated; return what to wait for."""
        return begin() if (updates := self.unfinished) is None else updates.begin_after([(self, first, last)], begin)

    def settle_update(self) -> None:
        """Wait until no step updates the shard, nor reads its gradient, any more; a step that failed is told to others."""
        if (updates := self.unfinished) is not None:
            updates.settle(self)

    def reading(self, read: Callable[[], T]) -> T:
        """Return what `read` does, of the shard on a drive. Raises `StepFailedError` where a step could not write that."""
        try:
            return read()
        except StoreError as error:
            if (failed := why_unread([self])) is not None:
                raise failed from error
            raise

    def read_to_host(self) -> torch.Tensor:
        """Return the shard after its last step, from its drive, in counted host memory of its own. Raises as `reading`."""
        host = self.context.memory.staged_buffer(self.shard_numel, self.dtype)
        self.reading(lambda: move(self.location(), on_host(host), by=route_of(self.context)).wait())
        return host

    def begin_replacing(self) -> None:
        """Call before all values are replaced: waits as `settle_update`, and a failed step no longer counts for them."""
        self.context.full_copies.drop(self)
        if self.updates is not None:
            self.updates.replace(self)

    def spoil(self, why: str) -> None:
        """Mark the values incomplete: a change ended in its middle. Until they are replaced, nothing may compute with them."""
        parameter = self.parameter()
        self.context.spoiled[self] = why, None if parameter is None else parameter._version

    def restored(self) -> None:
        """Mark the values complete: they were replaced."""
        self.context.full_copies.drop(self)
        self.context.spoiled.pop(self, None)

    def check_whole(self) -> None:
        """Raise `StepFailedError` where a change of the shard ended in its middle and its values were not replaced since."""
        why, version = self.context.spoiled.get(self, ("", None))
        parameter = self.parameter()
        if why and self.at_hand and parameter is not None and parameter._version != version:
            self.restored()  # it was written to like any tensor
        elif why:
            if self.updates is not None:
                self.updates.tell()
            raise StepFailedError(why)


def why_spoiled(units: Iterable[Updatable]) -> StepFailedError | None:
    """Return the error of the first unit with incomplete values; None if all are complete."""
    try:
        for unit in units:
            unit.check_whole()
    except StepFailedError as error:
        return error
    return None


def why_unread(units: Iterable[Updatable]) -> StepFailedError | None:
    """After a drive's error in reading some units: wait for the step that still updates them, and return its error if it fails.

    What it has written is read before it knows that the drive refused that: its own error names the cause, and what to load.
    """
    read = list(units)
    for updates in dict.fromkeys(updates for unit in read if (updates := unit.unfinished) is not None):
        updates.settle_all()
    return why_spoiled(read)
