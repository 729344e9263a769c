"""Where the values of parameters are kept while these are being born: in their unit, or for now in memory or a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from zinf_compile.errors import StoreError
from zinf_compile.runtime.comm.shard_ranges import shard_numel, shard_range
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.storage.file_read import read_at
from zinf_compile.runtime.storage.scratch_file import ScratchFile
from zinf_compile.runtime.units.backing import NvmeBacking
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import gather_whole

from .materializing import ValueStore
from .parallel_random import Fill
from .shard_writer import PieceWriter, pieces_of

_MOST_UNSYNCED_BYTES = 64 << 20


def part_of_unit(whole: torch.Tensor, shard: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Fill a unit's shard with this rank's part of the flat whole; return the shard."""
    parts, wholes = unit.split(shard, whole)
    for part, stretch in zip(parts, wholes, strict=True):
        part_of(stretch, part, unit.context)
    return shard


def part_of(whole: torch.Tensor, shard: torch.Tensor, context: Context) -> torch.Tensor:
    """Fill a shard with this rank's part of a flat tensor; return the shard."""
    start, end = shard_range(whole.numel(), context.size, context.rank)
    shard[: end - start].copy_(whole[start:end])
    shard[end - start :].zero_()
    return shard


def gather(shard: torch.Tensor, into: torch.Tensor, context: Context, name: str) -> None:
    """Fill a flat tensor of the host from all ranks' shards."""
    with filled_on(shard.device, into, context) as full:
        pending = context.lanes.gather.submit(lambda: context.gathers.all_gather([shard], [full]))
        context.finish(pending, f"gathering {name}")


@contextlib.contextmanager
def filled_on(device: torch.device, into: torch.Tensor, context: Context) -> Iterator[torch.Tensor]:
    """Context with what a gather may fill on a device, so that a flat tensor is filled afterwards, wherever that is."""
    full = into if into.device == device else context.full_buffer(into.numel(), into.dtype, device)
    yield full
    if full is not into:
        into.copy_(full)


class UnitValues:
    """The unit's own place, whatever its tier: what is saved here stays."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def load(self, into: torch.Tensor) -> None:
        """See `ValueStore.load`."""
        unit = self._unit
        if unit.backing is not None and unit.context.size == 1:
            unit.backing.read(into).wait()
        else:
            with filled_on(unit.device, into, unit.context) as full:
                gather_whole(unit, unit.load(), full, f"gathering {unit.name}")

    def save(self, whole: torch.Tensor) -> Pending:
        """See `ValueStore.save`."""
        unit = self._unit
        if unit.backing is not None and unit.context.size == 1:
            return unit.backing.write(whole)
        return unit.start_saving(part_of_unit(whole, unit.blank(), unit))

    def fill(self, fill: Fill, writer: PieceWriter) -> bool:
        """See `ValueStore.fill`."""
        if not isinstance(self._unit.backing, NvmeBacking):
            return False
        pieces = pieces_of(self._unit)
        for piece, make in zip(pieces, fill.parts(piece.start for piece in pieces), strict=True):
            writer.write(self._unit, piece, make)
        return True


class HostValues:
    """Host memory."""

    def __init__(self, context: Context, name: str) -> None:
        self._context, self._name = context, name
        self._shard = torch.empty(0)

    def load(self, into: torch.Tensor) -> None:
        """See `ValueStore.load`."""
        gather(self._shard, into, self._context, self._name)

    def save(self, whole: torch.Tensor) -> Pending:
        """See `ValueStore.save`."""
        numel = shard_numel(whole.numel(), self._context.size)
        if (self._shard.numel(), self._shard.dtype) != (numel, whole.dtype):
            self._shard = torch.empty(numel, dtype=whole.dtype)
        part_of(whole, self._shard, self._context)
        return Done()

    def fill(self, fill: Fill, writer: PieceWriter) -> bool:
        """See `ValueStore.fill`."""
        return False

    def hand_over(self, shard: torch.Tensor) -> torch.Tensor:
        """Fill a shard with this rank's part, and keep that no longer; return the shard."""
        shard.copy_(self._shard)
        self._shard = torch.empty(0)
        return shard


class Notebook:
    """A nameless file on a drive that grows: the sizes of what it will hold aren't known beforehand."""

    def __init__(self, folder: str) -> None:
        self._scratch = ScratchFile(folder)
        path = f"/proc/self/fd/{self._scratch.file.fd}"
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # without O_DIRECT: pieces are of any size
        self.folder = folder
        self._end = self._unsynced = 0

    def take(self, size: int) -> int:
        """Return where `size` bytes may be written."""
        start, self._end = self._end, self._end + size
        return start

    def write(self, data: torch.Tensor, offset: int) -> None:
        """Write all bytes of a tensor, and don't let them fill the page cache."""
        view, wrote = memoryview(data.numpy().data), 0
        while wrote < len(view):
            try:
                wrote += os.pwrite(self.fd, view[wrote:], offset + wrote)
            except OSError as error:
                raise StoreError(
                    error.errno,
                    f"cannot write a scratch file in {self.folder!r} beyond {offset + wrote:,} bytes: {error.strerror}",
                ) from error
        self._unsynced += wrote
        if self._unsynced > _MOST_UNSYNCED_BYTES:
            os.fdatasync(self.fd)  # what isn't on the drive yet can't leave memory
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._unsynced = 0

    def close(self) -> None:
        """Free the space."""
        os.close(self.fd)
        self._scratch.close()


class SpilledValues:
    """A stretch of a notebook, as long as this rank's part without its padding."""

    def __init__(self, notebook: Notebook, context: Context, name: str) -> None:
        self._notebook, self._context, self._name = notebook, context, name
        self._start = self._size = 0

    def load(self, into: torch.Tensor) -> None:
        """See `ValueStore.load`."""
        if self._context.size == 1:
            self.hand_over(into)
        else:
            shard = into.new_empty(shard_numel(into.numel(), self._context.size))
            gather(self.hand_over(shard), into, self._context, self._name)

    def save(self, whole: torch.Tensor) -> Pending:
        """See `ValueStore.save`."""
        start, end = shard_range(whole.numel(), self._context.size, self._context.rank)
        part = whole[start:end].view(torch.uint8)
        if part.numel() != self._size:
            self._start, self._size = self._notebook.take(part.numel()), part.numel()
        self._notebook.write(part, self._start)
        return Done()

    def fill(self, fill: Fill, writer: PieceWriter) -> bool:
        """See `ValueStore.fill`."""
        return False

    def hand_over(self, shard: torch.Tensor) -> torch.Tensor:
        """Fill a shard with this rank's part; return the shard."""
        data = shard.view(torch.uint8) if shard.device.type == "cpu" else torch.empty(shard.nbytes, dtype=torch.uint8)
        read_at(self._notebook.fd, data[: self._size], self._start)
        data[self._size :].zero_()
        return shard if shard.device.type == "cpu" else shard.copy_(data.view(shard.dtype))


__all__ = ["HostValues", "Notebook", "SpilledValues", "UnitValues", "ValueStore", "gather", "part_of"]
