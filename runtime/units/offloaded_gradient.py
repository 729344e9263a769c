"""Gradients that live off their device, and changes of them that are made when they are next read."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence

import torch

from zinf_compile.errors import StepFailedError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.lanes.lanes import All, Done, Job, Pending
from zinf_compile.runtime.lanes.stream_lane import TransferToHost
from zinf_compile.runtime.memory.leaving_norms import LeavingNorm
from zinf_compile.runtime.transfer.move import Location, move, on_host, route_of

from .backing import NvmeBacking, ShardBacking
from .nvme_gradient_pool import NvmeGradientPool
from .unit import Tile, Unit

_orders = itertools.count(1)

InPlace = Callable[[torch.Tensor], object]
"""Changes a gradient, or a piece of one, element by element."""


class OffloadedGradient:
    """The shard of a reduced gradient, off the device or in flight from it.

    Changes that need nothing but the element itself are noted, and made when the gradient is next read. In host memory they are
    made there, on the lane of changes, each after the copy that brings what it changes: nobody waits for them but who reads.
    """

    def __init__(self, unit: Unit | Tile, backing: ShardBacking, numel: int, dtype: torch.dtype) -> None:
        self.unit = unit
        self.backing = backing
        self.numel = numel
        self.dtype = dtype
        self.spoiled = ""
        """The reason why its values are incomplete: a change ended in its middle."""
        self.version = 0
        """Counts the changes."""
        self._changes: list[InPlace] = []
        self._arriving: Pending | None = None
        self._is_changing = False
        """Whether the last of what is on its way is a change, rather than a copy."""
        self.order = 0
        """The number of the copy that brings it here, or of one that arrives later where a change waits for more, of all of the
        process."""
        self._reading: tuple[torch.Tensor, Pending] | None = None
        self.norms: Sequence[Sequence[LeavingNorm]] = ()
        """Norms that were taken before it left the device, when nothing had changed it; of a tiled one those of each tile."""

    def norms_of(self, key: Hashable) -> list[torch.Tensor] | None:
        """Return the norm for which `key` asks, or that of each tile, for the current stream; None where it isn't known."""
        if not self.norms or self.version or self.spoiled:
            return None
        of_parts = [next((norm for norm in part if norm.key == key), None) for part in self.norms]
        found = [value for norm in of_parts if norm is not None and (value := norm.get()) is not None]
        return found if len(found) == len(self.norms) else None

    def arrive(self, pending: Pending) -> None:
        """Note the transfer to the shard's backing."""
        self._arriving, self._is_changing, self.order = pending, False, next(_orders)

    @property
    def under_way(self) -> Pending | None:
        """What brings it to host memory on one rank, or changes it there, and isn't over yet: a step may wait for that later.

        None: `wait_written` says whether it is there.
        """
        if self.backing.resident is None or self.spoiled or self.unit.context.size > 1:
            return None
        return None if self._arriving is None or _is_over(self._arriving) else self._arriving

    @property
    def arriving(self) -> Pending:
        """The transfer to the shard's backing."""
        return self._arriving or Done()

    def wait_written(self) -> None:
        """Wait until the shard is in its backing; raise the error of the transfer, or of a change that ended in its middle."""
        if self.spoiled:
            raise StepFailedError(self.spoiled)
        self._settle()
        if self._arriving is not None:
            if isinstance(self._arriving, Job) and not self._arriving.is_over():
                self.unit.context.lanes.finish_changes()
            self._arriving.wait()
            self._arriving = None
            self.unit.context.lanes.settle()  # the gradients of which it was made

    @property
    def _whole_unit(self) -> Unit:
        return self.unit.unit if isinstance(self.unit, Tile) else self.unit

    def _settle(self) -> None:
        """Wait for a step that has still to apply this gradient, from the memory where it is."""
        if self.backing.resident is not None:
            self._whole_unit.settle_update()

    def prepare(self, *, early: bool = False) -> None:
        """Start to read the shard for the next `load`; with `early`, only where memory is left for it."""
        context, size = self.unit.context, format_of(self.dtype).bytes(self.numel)
        if self._reading is None and not (early and not context.memory.has_room(context.memory.host_ledger, size)):
            self.wait_written()
            buffer = context.memory.staged_buffer(self.numel, self.dtype)
            self._reading = buffer, self._read(buffer, 0)

    def load(self) -> torch.Tensor:
        """Return the shard in host memory of its own."""
        self.prepare()
        assert self._reading is not None
        (buffer, pending), self._reading = self._reading, None
        pending.wait()
        self.apply(buffer)
        return buffer

    def store(self, shard: torch.Tensor) -> None:
        """Replace the shard by one in host memory."""
        assert not isinstance(self.unit, Tile), "a tile's is only in flight"
        self.unit.wait_updated()  # a step may still have to read the old one
        self._reading = None
        self.spoiled = ""
        self._changes.clear()
        self._write(shard, 0)
        self.version += 1

    def load_part(self, tile: Tile) -> torch.Tensor:
        """Return a tile's part of the shard: where it is in host memory, or a copy of what is on a drive."""
        return self.load_piece(tile.span.place, tile.span.place + tile.shard_numel)

    def load_piece(self, start: int, end: int) -> torch.Tensor:
        """Return the same of the elements [start, end), which begin and end where pieces do."""
        self._reading = None
        self.wait_written()
        resident = self.backing.resident
        if resident is not None:
            self.unit.context.link.wait_read(resident)
            return resident[start:end]
        buffer = self.unit.context.memory.staged_buffer(end - start, self.dtype)
        self._read(buffer, start).wait()
        self.apply(buffer)
        return buffer

    def store_part(self, tile: Tile, part: torch.Tensor) -> None:
        """Replace a tile's part, which `load_part` returned; `stored` says when that was done to all."""
        self._write(part, tile.span.place)

    def stored(self) -> None:
        """Note that all parts were replaced."""
        self._reading = None
        self._changes.clear()
        self.version += 1

    def _read(self, into: torch.Tensor, start: int) -> Pending:
        place = self.backing.location(start, start + into.numel())
        return move(place, on_host(into), by=route_of(self.unit.context))

    def _write(self, source: torch.Tensor, start: int) -> None:
        place = self.backing.location(start, start + source.numel())
        move(on_host(source), place, by=route_of(self.unit.context)).wait()

    def change(self, change: InPlace, *, of: Sequence[OffloadedGradient] = ()) -> None:
        """Note a change; where the shard is in host memory, have it made, once it and those `of` which it is made are there."""
        self._reading = None
        self.version += 1
        resident = self.backing.resident
        if resident is None:
            assert not of, "what is on a drive is read to be changed by another"
            self._changes.append(change)
            return
        if spoiled := next((each.spoiled for each in (self, *of) if each.spoiled), ""):
            raise StepFailedError(spoiled)
        context, shard, unit = self.unit.context, resident, self._whole_unit
        updates = unit.unfinished  # of a step before this change, which may still have to apply the old one
        changed = (self, *of)
        before = [each.arriving for each in changed]
        reads = context.link.reads_of(shard)
        is_next = updates is None and not reads and not any(each._is_changing for each in changed)

        def run() -> None:
            for pending in (*before, *reads):
                pending.wait()
            if updates is not None:
                updates.settle(unit)
            change(shard)

        with context.lanes.meter.waiting():
            if is_next:  # it waits for copies alone
                self.order = max(each.order for each in changed)
                self._arriving = context.lanes.changes.submit_behind(
                    self.order, run, is_there=lambda: not any(map(_is_under_way, before))
                )
            else:
                self.arrive(context.lanes.changes.submit(run))
        self._is_changing = True

    def change_now(self, change: InPlace) -> None:
        """Make a change of a shard in host memory, where it is."""
        resident = self.backing.resident
        assert resident is not None, "what is on a drive is loaded"
        self._reading = None
        self.version += 1
        self.wait_written()
        self.unit.context.link.wait_read(resident)
        change(resident)

    def copy_to_device(self, start: int = 0, end: int | None = None) -> tuple[torch.Tensor, Pending]:
        """Start to copy elements [start, end) of a shard in host memory to the device, to be read there and dropped."""
        context, resident = self.unit.context, self.backing.resident
        assert resident is not None, "what is on a drive comes to host memory first"
        if self.spoiled or isinstance(self._arriving, Job):  # else the copies order each other
            self.wait_written()
        self._settle()
        part = resident[start:end]
        context.memory.make_room(context.memory.ledger, part.nbytes)
        there = context.link.device_buffer(part.numel(), part.dtype)
        context.memory.ledger.track("staging", there)
        return there, move(on_host(part), Location(there), by=route_of(context), after=self._arriving)

    def apply(self, part: torch.Tensor) -> None:
        """Make the noted changes on what was read."""
        self.noted()(part)

    def noted(self) -> InPlace:
        """Return the changes noted so far as one function; later ones don't count."""
        changes = tuple(self._changes)

        def apply(part: torch.Tensor) -> None:
            for change in changes:
                change(part)

        return apply


def _is_over(pending: Pending) -> bool:
    """Return whether a copy is known to be over."""
    return isinstance(pending, All | TransferToHost | Done | Job) and not _is_under_way(pending)


def _is_under_way(pending: Pending) -> bool:
    """Return whether a copy is known not to be over."""
    if isinstance(pending, All):
        return any(map(_is_under_way, pending.parts))
    if isinstance(pending, TransferToHost):
        return not pending.transfer.is_over()
    return isinstance(pending, Job) and not pending.is_over()


def offloaded_to_drive(unit: Unit, pool: NvmeGradientPool, index: int, numel: int, dtype: torch.dtype) -> OffloadedGradient:
    """Return a gradient with space on drives, which is freed when the gradient is dropped."""
    shards = pool.take(index)
    offloaded = OffloadedGradient(unit, NvmeBacking(shards, index), numel, dtype)
    weakref.finalize(offloaded, pool.give_back, index, shards).atexit = False
    return offloaded
