"""Reads and writes of single blocks: ordered where they overlap, staged where memory is not aligned, checked at arrival."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import torch

from zinf_compile.errors import StoreError, StoreRequestError, ZinfError
from zinf_compile.runtime.lanes.link_meter import READ, WRITTEN
from zinf_compile.runtime.lanes.wait_times import record_wait
from zinf_compile.runtime.memory.aligned_buffers import BufferPool

from .block_checksums import BlockChecks
from .engine import Engine, File, Request
from .extents import Block

_PATIENCE_S = 0.05
"""Until the next look for a staging buffer, where others' are about to come back."""


class Piece:
    """One block in flight. Any thread may finish it: the first does, the others wait for it."""

    def __init__(self, io: BlockIO, block: Block, data: torch.Tensor, staging: torch.Tensor | None, *, write: bool) -> None:
        self.block = block
        self.data = data
        self.staging = staging
        self.write = write
        self.error: Exception | None = None
        self.times: tuple[float, float] | None = None
        """When the drive was busy with it, once it is over."""
        self._io = io
        self._stream = torch.accelerator.current_stream(data.device) if data.device.type != "cpu" else None
        self._request: Request | None = None
        self._over = False
        self._lock = threading.Lock()

    def start(self) -> bool:
        """Submit it, unless another piece must be finished first; return whether it was."""
        with self._lock:  # who finishes it from now on waits until it is submitted
            try:
                if not self._io.admit(self):
                    return False
            except BaseException:  # an interrupt may come when it is registered already
                self._io.withdraw(self)
                raise
            try:
                self._request = self._io.submit(self)
            except Exception as error:
                self._end(error)
            except BaseException as interrupt:  # the engine may have begun: it keeps the staging buffer, the pool loses it
                self.staging = None
                self._end(RuntimeError(f"interrupted by {interrupt!r}"))
                raise
            return True

    def done(self) -> bool:
        """Return whether `finish` would not wait for the drive."""
        request = self._request
        return self._over or (request is not None and request.done())

    def finish(self) -> None:
        """Wait for the drive, check what it says and what it returned, give the staging buffer back; keep the error, if any."""
        start = None if self.done() else time.perf_counter()
        with self._lock:
            if not self._over:
                self._finish()
        if start is not None:
            record_wait(WRITTEN if self.write else READ, start)

    def _finish(self) -> None:
        assert self._request is not None, "a piece is submitted under its lock"
        try:
            self._io.check(self, self._request.wait())
            if not self.write and self.staging is not None:
                with self._stream or contextlib.nullcontext():
                    self.data.copy_(self.staging[: self.data.numel()])
        except Exception as error:
            if not self._request.done():  # it was given up, and the drive may still write to the staging buffer
                self._io.lose_staging(self)
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if error is not None and not isinstance(error, ZinfError):
            error = self._explain(error)
        self.times = None if self._request is None else self._request.times
        self.error, self._over, self._request = error, True, None
        self._io.leave(self)

    def _explain(self, error: Exception) -> ZinfError:
        what = f"cannot {'write' if self.write else 'read'} {self._io.describe(self.block)}: {error}"
        folder = self._io.folder(self.block)
        explained = StoreError(error.errno, what, folder) if isinstance(error, OSError) else StoreRequestError(what)
        explained.__cause__ = error
        return explained


class BlockIO:
    """Begins pieces and keeps those under way.

    Of two pieces of one block, one of them a write, the second is submitted when the first is finished. No piece waits for
    another while it holds a lock, and one that holds a staging buffer waits for the drive only: so none waits in a circle.
    """

    def __init__(
        self,
        engine: Engine,
        files: Sequence[File],
        checks: BlockChecks,
        staging: BufferPool,
        *,
        describe: Callable[[Block], str],
        folder: Callable[[Block], str],
        verify: bool,
    ) -> None:
        self.describe = describe
        self.folder = folder
        self._engine = engine
        self._files = files
        self._checks = checks
        self._staging = staging
        self._verify = verify
        self._lock = threading.Lock()
        self._under_way: dict[int, list[Piece]] = collections.defaultdict(list)

    def begin(self, block: Block, data: torch.Tensor, *, write: bool) -> Piece:
        """Start to read a block into `data`, its bytes, or to write it from there. Raises where there is nothing to read."""
        alignment = self._files[block.device].alignment
        direct = data.device.type == "cpu" and not (data.data_ptr() % alignment or block.size % alignment)
        staging = None if direct else self._take_staging(-(-block.size // alignment) * alignment)
        piece = Piece(self, block, data, staging, write=write)
        try:
            while not piece.start():
                self.finish_earlier(block, write=write)
        except BaseException:
            if piece.staging is not None:
                self._staging.give_back(piece.staging)
            raise
        return piece

    def finish_earlier(self, block: Block, *, write: bool) -> None:
        """Finish what a read, or a write, of the block must come after."""
        with self._lock:
            earlier = self._rivals(block, write=write)
        for piece in earlier:
            piece.finish()

    def drain(self) -> None:
        """Finish everything under way."""
        with self._lock:
            pieces = [piece for under_way in self._under_way.values() for piece in under_way]
        for piece in pieces:
            piece.finish()

    def admit(self, piece: Piece) -> bool:
        """Register a piece as under way, unless another one must be finished first; return whether it was."""
        with self._lock:
            if self._rivals(piece.block, write=piece.write):
                return False
            if piece.write:
                self._checks.begin_write(piece.block)
            else:
                self._checks.begin_read(piece.block)
            self._under_way[piece.block.number].append(piece)
            if piece.staging is not None:
                self._staging.hold(piece)
            return True

    def submit(self, piece: Piece) -> Request:
        """Hand a piece to the engine."""
        file, offset = self._files[piece.block.device], piece.block.offset
        if piece.staging is None:
            memory = piece.data
        else:
            alignment = file.alignment
            memory = piece.staging[: -(-piece.block.size // alignment) * alignment]
            if piece.write:
                memory[: piece.block.size].copy_(piece.data)
                memory[piece.block.size :].zero_()
        transfer = self._engine.write if piece.write else self._engine.read
        return transfer(file, offset, memory, checksum=self._verify)

    def check(self, piece: Piece, checksum: int | None) -> None:
        """Record what was written, compare what was read."""
        if piece.write:
            self._checks.end_write(piece.block, checksum)
        else:
            self._checks.end_read(piece.block, checksum)

    def leave(self, piece: Piece) -> None:
        """Forget a piece that is over."""
        self.withdraw(piece)
        if piece.staging is not None:
            self._staging.give_back(piece.staging)
            piece.staging = None

    def lose_staging(self, piece: Piece) -> None:
        """Never use a piece's staging buffer again: the engine keeps it until the transfer is over."""
        if piece.staging is not None:
            self._staging.lose(piece.staging)
            piece.staging = None

    def withdraw(self, piece: Piece) -> None:
        """Register a piece no longer."""
        number = piece.block.number
        with self._lock:
            if piece in self._under_way.get(number, ()):
                self._under_way[number].remove(piece)
                if not self._under_way[number]:
                    del self._under_way[number]
        self._staging.forget(piece)

    def _rivals(self, block: Block, *, write: bool) -> list[Piece]:
        return [piece for piece in self._under_way.get(block.number, ()) if write or piece.write]

    def _take_staging(self, size: int) -> torch.Tensor:
        while (buffer := self._staging.take(size)) is None:
            with self._staging.lock:
                oldest = next(iter(self._staging.holders), None)
                if oldest is None:  # held by pieces that other threads are about to submit
                    self._staging.returned.wait(_PATIENCE_S)
            if oldest is not None:  # maybe another store's: it waits for its drive only
                oldest.finish()
        return buffer
