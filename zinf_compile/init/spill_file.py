"""A file on a drive that values are written to while their number isn't known, and a parameter's values in it."""

from __future__ import annotations

import os

import torch

from zinf_compile.errors import StoreError
from zinf_compile.runtime.comm.shard_ranges import shard_numel, shard_range
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.storage.file_read import read_at
from zinf_compile.runtime.storage.scratch_file import ScratchFile
from zinf_compile.runtime.transfer.move import Location, move, on_host, route_of

from .parallel_random import Fill
from .shard_writer import PieceWriter
from .value_stores import gather

_MOST_UNSYNCED_BYTES = 64 << 20


class SpillFile:
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
    """A range of a spill file, as long as this rank's part without its padding."""

    def __init__(self, file: SpillFile, context: Context, name: str) -> None:
        self._file, self._context, self._name = file, context, name
        self._start = self._size = 0

    def load(self, into: torch.Tensor) -> None:
        """See `ValueStore.load`."""
        size = self._context.ranks.shard_group.size
        if size == 1:
            self.hand_over(into)
        else:
            shard = into.new_empty(shard_numel(into.numel(), size))
            gather(self.hand_over(shard), into, self._context, self._name)

    def save(self, whole: torch.Tensor) -> Pending:
        """See `ValueStore.save`."""
        group = self._context.ranks.shard_group
        start, end = shard_range(whole.numel(), group.size, group.rank)
        part = whole[start:end].view(torch.uint8)
        if part.numel() != self._size:
            self._start, self._size = self._file.take(part.numel()), part.numel()
        self._file.write(part, self._start)
        return Done()

    def fill(self, fill: Fill, writer: PieceWriter) -> bool:
        """See `ValueStore.fill`."""
        return False

    def hand_over(self, shard: torch.Tensor, *, on_device: bool = True) -> torch.Tensor:
        """Fill a shard with this rank's part; return the shard."""
        data = (
            shard.view(torch.uint8)
            if not on_device or shard.device.type == "cpu"
            else torch.empty(shard.nbytes, dtype=torch.uint8)
        )
        read_at(self._file.fd, data[: self._size], self._start)
        data[self._size :].zero_()
        if data.device != shard.device:
            move(on_host(data.view(shard.dtype)), Location(shard), by=route_of(self._context)).wait()
        return shard
