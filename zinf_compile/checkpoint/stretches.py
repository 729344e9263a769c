"""The stretches of a checkpoint's files that have a checksum each: read by the I/O engine, compared when they have arrived.

Called by `saved_files`; any thread may call.
"""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.direct_file import Descriptor, File
from zinf_compile.runtime.storage.engine import Engine, crc32c
from zinf_compile.runtime.storage.file_read import FileRead, read_at

from .parts_writer import CHECKED_BYTES, PAGE
from .regular_file import open_regular
from .saved_tensors import SavedPart

_MOST_OPEN = 32
"""Files that are kept open, with up to three descriptors each."""

_LEAST_DIRECT_BYTES = 128 << 10
"""What is shorter comes through the page cache, when it is needed."""


class Stretches:
    """The stretches of all files of a folder. `read_bytes` counts what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.read_bytes = 0
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, _Opened] = {}
        self._engine: Engine | None = None
        self._pool = _Pool(sys.maxsize)
        self._shared: weakref.WeakValueDictionary[tuple[str, int, int], Stretch] = weakref.WeakValueDictionary()
        self._last: Stretch | None = None
        """The last one of which not all was wanted: the next read often wants the rest."""

    def begin(self, key: str, part: SavedPart, number: int, size: int, *, whole: bool) -> Stretch:
        """Start to read a stretch of a part of the tensor `key`, given by its number and bytes; `whole`: all of it is wanted."""
        with self._lock:
            name = part.file, part.begin, number
            known = None if whole else self._shared.get(name)
            if known is not None:
                return known
            stretch = Stretch(self._open(part.file), self._engine, self._pool, key, part, number, size)
            self.read_bytes += size
            if not whole:
                self._shared[name] = self._last = stretch
            return stretch

    def close(self) -> None:
        """Close the files."""
        self._last = None
        self._files.clear()
        self._pool.clear()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _open(self, name: str) -> _Opened:
        if self._engine is None:
            self._engine = Engine()
        known = self._files.pop(name) if name in self._files else None
        found = self._files[name] = known or _Opened(self._folder / name)
        if len(self._files) > _MOST_OPEN:
            del self._files[next(iter(self._files))]
        return found


class Stretch:
    """One stretch, in flight or arrived."""

    def __init__(
        self, opened: _Opened, engine: Engine | None, pool: BufferPool, key: str, part: SavedPart, number: int, size: int
    ) -> None:
        self._opened, self._key, self._part, self._number, self.size = opened, key, part, number, size
        self._lock = threading.Lock()
        self._block: torch.Tensor | None = None
        self._offset = part.begin + number * CHECKED_BYTES
        self._read: FileRead | None = None
        if size >= _LEAST_DIRECT_BYTES and engine is not None:
            self._read = FileRead(engine, opened.file, opened.fd, self._offset, size, pool)

    def copy(self, low: int, high: int, into: torch.Tensor) -> None:
        """Fill a tensor of bytes with those from `low` to `high`. Raises `CheckpointError` where the checksum differs."""
        with self._lock:
            if self._block is None and high - low == self.size:
                self._fill(into)
                return
            if self._block is None:
                block = torch.empty(self.size, dtype=torch.uint8)
                self._fill(block)
                self._block = block
            into.numpy()[:] = self._block.numpy()[low:high]

    def _fill(self, into: torch.Tensor) -> None:
        if self._read is not None:
            got, self._read = self._read.finish(into), None
        else:
            got = read_at(self._opened.fd, into, self._offset, keep=True)
        path = self._opened.path
        if got < self.size:
            raise CheckpointError(f"{path} ends at byte {self._offset + got:,}, before what its manifest says: fetch it again")
        if crc32c(into) != self._part.checksums[self._number]:
            low = self._number * CHECKED_BYTES
            raise CheckpointError(
                f"{path} is damaged: the checksum of {self._key} differs in its bytes {low:,} to {low + self.size:,}. Load an "
                "older checkpoint, or fetch this one again"
            )


class _Opened:
    """A file; closed when nobody refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = Descriptor(open_regular(path, links=False))
        self.fd = self._descriptor.fd
        self.file = File(self.fd)


class _Pool(BufferPool):
    """Buffers of one size, that of a stretch with the rest of its first and last page."""

    def take(self, size: int) -> torch.Tensor | None:
        return super().take(max(size, CHECKED_BYTES + 2 * PAGE))
