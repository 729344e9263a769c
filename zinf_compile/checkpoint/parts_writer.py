"""Writes the files of a checkpoint in any order, past the page cache, with a bounded number of bytes in memory.

Values are copied to staging buffers, so that a page of the file is a page of memory; whole pages go to the drive directly, what
is left of them at the borders of a write goes through the page cache. Called by `save`; knows files and bytes, no models.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import mmap
import os
import time
from pathlib import Path

import torch

from zinf_compile.errors import StoreRequestError
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.engine import Engine, File, Request, crc32c_combine

from .file_layout import FileLayout, Part
from .reserved_space import UNSUPPORTED, ReservedFile, allocate
from .safetensors_writer import new_file, write_all

PAGE = mmap.PAGESIZE

_POLL_S = 0.0005

CHECKED_BYTES = 4 << 20
"""A part has one checksum for each of its stretches of this length, so that a reader of some of it reads little more."""


class StagingBuffers:
    """`count` buffers of `size` bytes that take turns; whoever takes one waits for what was written from it before.

    Any thread may take one, and has it to itself until it is used; where others have all of them it waits for the first.
    """

    def __init__(self, count: int, size: int) -> None:
        if size < 2 * PAGE:
            raise ValueError(f"a staging buffer of {size} bytes; accepted: two pages, {2 * PAGE} bytes, or more")
        self._buffers = collections.deque((aligned_buffer(size), list[Request]()) for _ in range(count))
        self.numel = size - PAGE
        """Bytes that one takes wherever in a page they begin."""

    def take(self) -> torch.Tensor:
        """Return the buffer that was used the longest ago. Raises `OSError` where writing it failed."""
        while True:
            with contextlib.suppress(IndexError):
                buffer, requests = self._buffers.popleft()
                break
            time.sleep(_POLL_S)
        try:
            for request in requests:
                request.wait()
        except BaseException:
            self._buffers.append((buffer, requests))
            raise
        return buffer

    def used(self, buffer: torch.Tensor, requests: list[Request]) -> None:
        """Give back a buffer, and note what writes from it."""
        self._buffers.append((buffer, requests))


class PartsWriter:
    """One new file, or a `reserved` one that gets its name. Raises `OSError` with errno and path, `FileExistsError` if anything
    has that name.
    """

    def __init__(
        self, path: Path, layout: FileLayout, engine: Engine, staging: StagingBuffers, reserved: ReservedFile | None = None
    ) -> None:
        self.layout = layout
        self._engine, self._staging = engine, staging
        with new_file(path, sync=False) if reserved is None else reserved.named(path) as fd:  # `finish` syncs it
            os.ftruncate(fd, min(layout.size, os.fstat(fd).st_size))
            _allocate(fd, path, layout.size)
            write_all(fd, memoryview(layout.header))
        self._file = File(path, write=True)
        self._requests: dict[str, dict[int, tuple[int, Request]]] = {part.key: {} for part in layout.parts}
        """Of each part the writes, by their offsets in the file: bytes, and their checksum to come."""

    def write(self, part: Part, start: int, values: torch.Tensor) -> None:
        """Start to write the elements of a part from number `start` on; `values`, flat in host memory, may change afterwards.

        Any thread may, of different elements. What an interrupt has cut short may be written once more, from the same `start`.
        """
        data = values.view(torch.uint8)
        offset = part.begin + start * values.element_size()
        if values.dtype != part.dtype or not part.begin <= offset <= offset + data.numel() <= part.end:
            raise StoreRequestError(
                f"{values.numel()} elements of {values.dtype} from {start} on, for {part.key} of {part.rectangle.numel} "
                f"{part.dtype} in {self._file.path}"
            )
        while data.numel():
            checked = CHECKED_BYTES - (offset - part.begin) % CHECKED_BYTES
            count = min(data.numel(), checked, self._staging.numel)
            self._write(part.key, offset, data[:count])
            data, offset = data[count:], offset + count

    def _write(self, key: str, offset: int, data: torch.Tensor) -> None:
        end = offset + data.numel()
        buffer, shift = self._staging.take(), offset - offset % PAGE
        first, last = -(-offset // PAGE) * PAGE, end // PAGE * PAGE
        borders = [offset, first, last, end] if first < last else [offset, end]
        started: list[Request] = []
        try:
            buffer.numpy()[offset - shift : end - shift] = data.numpy()  # by this thread alone: others may be busy elsewhere
            for begin, stop in itertools.pairwise(borders):
                if begin < stop:
                    started.append(self._engine.write(self._file, begin, buffer[begin - shift : stop - shift], checksum=True))
                    self._requests[key][begin] = stop - begin, started[-1]
        finally:
            self._staging.used(buffer, started)

    def finish(self) -> dict[str, list[int]]:
        """Wait for what is under way and sync the file; return the CRC32C of each stretch of each part, by key.

        Raises `OSError`, and `StoreRequestError` where something of a part was never written.
        """
        checksums = {}
        for part in self.layout.parts:
            found, end = [0] * -(-(part.end - part.begin) // CHECKED_BYTES), part.begin
            for offset, (size, request) in sorted(self._requests[part.key].items()):
                value, number = request.wait(), (offset - part.begin) // CHECKED_BYTES
                assert value is not None, "asked for"
                if offset != end:
                    break
                found[number], end = crc32c_combine(found[number], value, size), end + size
            if end != part.end:
                raise StoreRequestError(f"{part.key} was not written from byte {end} to {part.end} of {self._file.path}")
            checksums[part.key] = found
        self._file.sync()
        self._file.close()
        return checksums

    def abandon(self) -> None:
        """Wait for what is under way and close the file, whatever became of it; who still writes meanwhile gets an error."""
        for requests in self._requests.values():
            for _, request in list(requests.values()):
                with contextlib.suppress(OSError):
                    request.wait()
        self._file.close()


def _allocate(fd: int, path: Path, size: int) -> None:
    """Give a file its size, and the space for it where the filesystem can; elsewhere others may take what was free."""
    try:
        allocate(fd, path, size)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        os.ftruncate(fd, size)
