"""Reads and writes of blocks: ordered where they overlap, staged where memory is not aligned, checked at arrival.

Note: Rows of blocks
    Small blocks that lie next to one another on a drive are moved by one request, through one staging buffer: a request costs
    more than copying a few pages does. Each block keeps the checksum of its own bytes, so that it can be moved by itself as well.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import torch

from zinf_compile.errors import StoreError, StoreRequestError, ZinfError
from zinf_compile.ir.sizes import round_up
from zinf_compile.runtime.lanes.link_meter import READ, WRITTEN
from zinf_compile.runtime.lanes.wait_times import record_wait
from zinf_compile.runtime.memory.aligned_buffers import BufferPool

from .block_checksums import BlockChecks
from .engine import Engine, File, Request, crc32c
from .extents import Block

_PATIENCE_S = 0.05
"""Until the next look for a staging buffer, where others' are about to come back."""


Part = tuple[Block, torch.Tensor]
"""A block, and the memory that it is read to, or written from: as many bytes."""


class Piece:
    """One block in flight, or a row of them. Any thread may finish it: the first does, the others wait for it."""

    def __init__(self, io: BlockIO, parts: Sequence[Part], staging: torch.Tensor | None, *, write: bool) -> None:
        self.blocks = [block for block, _ in parts]
        self.memory = [data for _, data in parts]
        """Of each block; let go of when it is over, since others may still hold the piece."""
        self.staging = staging
        self.write = write
        self.checksums: Sequence[int | None] = ()
        """Of the blocks of a row that is written."""
        self.error: Exception | None = None
        self.times: tuple[float, float] | None = None
        """When the drive was busy with it, once it is over."""
        self._io = io
        device = self.memory[0].device
        self._stream = torch.accelerator.current_stream(device) if device.type != "cpu" else None
        self._request: Request | None = None
        self._over, self._left = False, False
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
            begun = False
            try:
                memory = self._io.fill(self)
                begun = True
                self._request = self._io.submit(self, memory)
            except Exception as error:
                self._end(error)
            except BaseException as interrupt:
                if begun:  # the engine may have begun: it keeps the staging buffer
                    self._io.lose_staging(self)
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
            elif not self._left:
                self._leave()
        if start is not None:
            record_wait(WRITTEN if self.write else READ, start)

    def _finish(self) -> None:
        assert self._request is not None, "a piece is submitted under its lock"
        try:
            self._io.check(self, self._request.wait())
            if not self.write and self.staging is not None:
                with self._stream or contextlib.nullcontext():
                    for place, data in zip(self.places, self.memory, strict=True):
                        data.copy_(self.staging[place : place + data.numel()])
        except Exception as error:
            if not self._request.done():  # it was given up, and the drive may still write to the staging buffer
                self._io.lose_staging(self)
            self._end(error)
        else:
            self._end(None)

    @property
    def places(self) -> list[int]:
        """The bytes of the staging buffer from which each block is: as they lie on the drive."""
        return [block.offset - self.blocks[0].offset for block in self.blocks]

    def _end(self, error: Exception | None) -> None:
        if error is not None and not isinstance(error, ZinfError):
            error = self._explain(error)
        self.times = None if self._request is None else self._request.times
        self.error, self._over, self._request = error, True, None
        self._leave()

    def _leave(self) -> None:
        """Be under way no longer; what an interrupt has kept from that does it again."""
        self._io.leave(self)
        self.memory = []
        self._left = True

    def _explain(self, error: Exception) -> ZinfError:
        first, last = self.blocks[0], self.blocks[-1]
        named = self._io.describe(first) + ("" if first is last else f" to {self._io.describe(last)}")
        what, folder = f"cannot {'write' if self.write else 'read'} {named}: {error}", self._io.folder(first)
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
        return self._begin([(block, data)], None if direct else self._take_staging(self._span([block])), write=write)

    def begin_row(self, parts: Sequence[Part], *, write: bool) -> Piece:
        """Start to read blocks that lie next to one another on a drive into host memory, or to write them, by one request.

        See Note: Rows of blocks. All of them together are staged.
        """
        if len(parts) == 1:
            return self.begin(*parts[0], write=write)
        return self._begin(parts, self._take_staging(self._span([block for block, _ in parts])), write=write)

    def _begin(self, parts: Sequence[Part], staging: torch.Tensor | None, *, write: bool) -> Piece:
        piece = Piece(self, parts, staging, write=write)
        try:
            while not piece.start():
                self._finish_earlier(piece)
        except BaseException:
            if piece.staging is not None:
                self._staging.give_back(piece.staging)
            raise
        return piece

    def _finish_earlier(self, piece: Piece) -> None:
        """Finish what a read, or a write, of the blocks must come after."""
        with self._lock:
            earlier = self._rivals(piece)
        for other in earlier:
            other.finish()

    def drain(self) -> None:
        """Finish everything under way."""
        with self._lock:
            pieces = dict.fromkeys(piece for under_way in self._under_way.values() for piece in under_way)
        for piece in pieces:
            piece.finish()

    def admit(self, piece: Piece) -> bool:
        """Register a piece as under way, unless another one must be finished first; return whether it was."""
        with self._lock:
            if self._rivals(piece):
                return False
            begin = self._checks.begin_write if piece.write else self._checks.begin_read
            for block in piece.blocks:
                begin(block)
            for block in piece.blocks:
                self._under_way[block.number].append(piece)
            if piece.staging is not None:
                self._staging.hold(piece)
            return True

    def fill(self, piece: Piece) -> torch.Tensor:
        """Return the memory that the engine reads to or writes from, filled with what is written."""
        if piece.staging is None:
            return piece.memory[0]
        memory = piece.staging[: self._span(piece.blocks)]
        if piece.write:
            ends = [*piece.places[1:], memory.numel()]
            for block, data, place, end in zip(piece.blocks, piece.memory, piece.places, ends, strict=True):
                memory[place : place + block.size].copy_(data)
                memory[place + block.size : end].zero_()
            if len(piece.blocks) > 1:
                piece.checksums = self._checksums_of(piece)
        return memory

    def submit(self, piece: Piece, memory: torch.Tensor) -> Request:
        """Hand a piece to the engine."""
        first = piece.blocks[0]
        transfer = self._engine.write if piece.write else self._engine.read
        return transfer(self._files[first.device], first.offset, memory, checksum=self._verify and len(piece.blocks) == 1)

    def check(self, piece: Piece, checksum: int | None) -> None:
        """Record what was written, compare what was read."""
        found: Sequence[int | None] = [checksum]
        if len(piece.blocks) > 1:
            found = piece.checksums if piece.write else self._checksums_of(piece)
        end = self._checks.end_write if piece.write else self._checks.end_read
        for block, each in zip(piece.blocks, found, strict=True):
            end(block, each)

    def _checksums_of(self, piece: Piece) -> list[int | None]:
        """Return the checksums of a row's blocks, each of what is moved where it is moved by itself."""
        staging = piece.staging
        assert staging is not None, "a row is staged"
        if not self._verify:
            return [None] * len(piece.blocks)
        places = zip(piece.blocks, piece.places, strict=True)
        return [crc32c(staging[place : place + self._span([block])]) for block, place in places]

    def _span(self, blocks: Sequence[Block]) -> int:
        """Return the bytes from the first block to the end of the last one, up to the alignment of their file."""
        first, last = blocks[0], blocks[-1]
        return last.offset - first.offset + round_up(last.size, self._files[last.device].alignment)

    def leave(self, piece: Piece) -> None:
        """Forget a piece that is over."""
        self.withdraw(piece)
        staging, piece.staging = piece.staging, None  # an interrupt may let this be done again: nothing is given twice
        if staging is not None:
            self._staging.give_back(staging)

    def lose_staging(self, piece: Piece) -> None:
        """Never use a piece's staging buffer again: the engine keeps it until the transfer is over."""
        if piece.staging is not None:
            self._staging.lose(piece.staging)
            piece.staging = None

    def withdraw(self, piece: Piece) -> None:
        """Register a piece no longer."""
        with self._lock:
            for number in [block.number for block in piece.blocks]:
                if piece in self._under_way.get(number, ()):
                    self._under_way[number].remove(piece)
                    if not self._under_way[number]:
                        del self._under_way[number]
        self._staging.forget(piece)

    def _rivals(self, piece: Piece) -> list[Piece]:
        under_way = self._under_way
        others = (other for block in piece.blocks for other in under_way.get(block.number, ()))
        return [other for other in others if piece.write or other.write]

    def _take_staging(self, size: int) -> torch.Tensor:
        while (buffer := self._staging.take(size)) is None:
            with self._staging.lock:
                oldest = next(iter(self._staging.holders), None)
                if oldest is None:  # held by pieces that other threads are about to submit
                    self._staging.returned.wait(_PATIENCE_S)
            if oldest is not None:  # maybe another store's: it waits for its drive only
                oldest.finish()
        return buffer
