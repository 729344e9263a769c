"""The store: named extents on one drive or several, read and written asynchronously, checked at every read."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import warnings
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch

from zinf_compile.errors import StoreError, StoreRequestError, StoreWarning
from zinf_compile.ir.sizes import BLOCK_BYTES, ROW_BYTES, SMALL_BYTES, STAGING_BYTES
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.system.accelerator import is_initialized
from zinf_compile.runtime.system.filesystem import look_up

from .block_checksums import BlockChecks
from .block_io import BlockIO, Part, Piece
from .drive_speed import measure_shares
from .engine import Engine, File
from .extents import Block, Key, Layout
from .scratch_file import ScratchFile, check_room, free_space

_log = logging.getLogger("zinf_compile")

_LEAST_ALIGNMENT = 4096
_ATTEMPTS = 3
"""To reserve space that other processes reserve some of at the same time."""

_LIVE: weakref.WeakSet[Store] = weakref.WeakSet()
"""Stores whose files a forked child must close, so that the space is free once the store's own process has ended."""

PathLike = str | os.PathLike[str]


class Transfer:
    """A read or write of an extent, or of a part of one, that has begun."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        """Return whether `wait` would not have to wait for a drive."""
        return all(piece.done() for piece in self._pieces)

    @property
    def times(self) -> tuple[float, float] | None:
        """When the drive was busy with it, by `time.perf_counter`; None as long as nobody knows."""
        times = [piece.times for piece in self._pieces if piece.times is not None]
        return (min(start for start, _ in times), max(end for _, end in times)) if len(times) == len(self._pieces) > 0 else None

    def wait(self) -> None:
        """Return when all bytes have arrived and were checked; raise `StoreError` where something went wrong.

        After an error, what a read was to fill holds nothing to rely on. May be called again, and from any thread.
        """
        for piece in self._pieces:
            piece.finish()
        for piece in self._pieces:
            if piece.error is not None:
                raise piece.error


class Store:
    """Keeps extents, laid out once, in one nameless file per path.

        with Store("/mnt/nvme0", [(("h.0.weight", "exp_avg"), 4096)]) as store:
            store.write(("h.0.weight", "exp_avg"), values).wait()
            reading = store.read(("h.0.weight", "exp_avg"), into)
            ...
            reading.wait()

    All space is reserved before the constructor returns, so a full disk or quota is an error then. The files have no name: no
    other job can meet them, and the kernel frees them however this process ends.

    Tensors are on the CPU or a GPU, contiguous, of any data type. Memory that is aligned, as that of `aligned_buffer` is, moves
    without a copy; other memory block by block through staging buffers. It may not change, or be read, before `wait` returned.

    A transfer of part of an extent names its `offset` in bytes, and begins and ends at multiples of `block_bytes` or at the
    extent's end: a block is what is checked as one. Transfers that meet in a block, one of them a write, are performed in the
    order of their submission: for that, the later submission waits for the earlier transfer. Any thread may call.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        extents: Iterable[tuple[Key, int]],
        *,
        engine: Engine | None = None,
        verify: bool = True,
        block_bytes: int = BLOCK_BYTES,
        staging_bytes: int = STAGING_BYTES,
        staging: BufferPool | None = None,
        pinned: bool | None = None,
        shares: Sequence[float] | None = None,
    ) -> None:
        """Lay out the extents, given as (name, bytes), and reserve their space.

        `engine`: one shared with others; by default one of its own. `verify=False`: no checksums at all. `staging_bytes`: the
        most memory for staging. `pinned`: pin that; by default where this process uses a GPU. `staging`: a pool shared with other
        stores, in place of both. `shares`: the part of the bytes that each of several paths takes; by default in proportion to
        its speed, measured now.
        """
        self.folders = [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else [os.fspath(path) for path in paths]
        if not self.folders or (shares is not None and len(shares) != len(self.folders)):
            raise StoreRequestError(f"paths={self.folders} with shares={shares}; accepted: one path or more, a share for each")
        self._pid = os.getpid()
        self._closed = False
        self._scratch: list[ScratchFile] = []
        self._io: BlockIO | None = None
        self._owns_engine = engine is None
        self.engine = engine or Engine()
        try:
            for folder in self.folders:
                self._scratch.append(ScratchFile(folder))
                _warn_of(folder, self._scratch[-1].file)
            alignment = math.lcm(_LEAST_ALIGNMENT, *(opened.file.alignment for opened in self._scratch))
            extents = list(extents)
            check_room(self.folders, sum(size for _, size in extents if isinstance(size, int)))
            shares = measure_shares(self.engine, self.folders) if shares is None else shares
            self.layout = self._lay_out(extents, block_bytes, alignment, shares)
        except BaseException:
            self.close()
            raise
        self.block_bytes = block_bytes
        self.staging = staging or BufferPool(
            max(staging_bytes, block_bytes), pinned=is_initialized() if pinned is None else pinned
        )
        self.checks = BlockChecks(self.layout.blocks, describe=self._describe, folder=self._folder)
        self._io = BlockIO(
            self.engine, self.files, self.checks, self.staging, describe=self._describe, folder=self._folder, verify=verify
        )
        _LIVE.add(self)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def files(self) -> list[File]:
        """The file of each path, as the engine has it open."""
        return [opened.file for opened in self._scratch]

    def read(self, key: Key, into: torch.Tensor, *, offset: int | None = None) -> Transfer:
        """Start to read an extent into a tensor of its size; with `offset`, as many bytes from there as the tensor has."""
        return self._begin(key, into, offset, write=False)

    def write(self, key: Key, source: torch.Tensor, *, offset: int | None = None) -> Transfer:
        """Start to write an extent from a tensor of its size; with `offset`, as many bytes from there as the tensor has."""
        return self._begin(key, source, offset, write=True)

    def read_together(self, rows: Sequence[tuple[Key, torch.Tensor]]) -> Transfer:
        """Start to read extents, each into a tensor of its size; small ones that lie next to one another by one request."""
        return self._begin_together(rows, write=False)

    def write_together(self, rows: Sequence[tuple[Key, torch.Tensor]]) -> Transfer:
        """Start to write extents, each from a tensor of its size; small ones that lie next to one another by one request."""
        return self._begin_together(rows, write=True)

    def close(self) -> None:
        """Wait for transfers in flight, then close the files, which frees their space. Does nothing in a forked child."""
        if self._closed:
            return
        self._closed = True
        if self._io is not None:
            self._io.drain()
        if self._owns_engine:
            self.engine.close()
        for opened in self._scratch:
            opened.close()

    def abandon(self) -> None:
        """In a forked child: close the files, so that they end with the process that made them."""
        self._closed = True
        for opened in self._scratch:
            opened.file.abandon()

    def _lay_out(self, extents: Sequence[tuple[Key, int]], block_bytes: int, alignment: int, shares: Sequence[float]) -> Layout:
        """Reserve the space of a layout; where others took some of it meanwhile, of one that makes do with what is left."""
        for attempt in itertools.count(1):
            free = free_space(self.folders)
            layout = Layout(extents, block_bytes=block_bytes, alignment=alignment, shares=shares, free=free)
            try:
                for opened, size in zip(self._scratch, layout.file_bytes, strict=True):
                    opened.reserve(size)
            except StoreError as error:
                if error.errno != errno.ENOSPC or len(self.folders) == 1 or attempt == _ATTEMPTS:
                    raise
                for opened in self._scratch:
                    opened.release()
            else:
                return layout
        raise AssertionError("the last attempt returns or raises")

    def _begin(self, key: Key, tensor: torch.Tensor, offset: int | None, *, write: bool) -> Transfer:
        io = self._open_io(key, write=write)
        parts = self._parts(key, tensor, offset)
        return _started(io.begin(block, part, write=write) for block, part in parts)

    def _begin_together(self, rows: Sequence[tuple[Key, torch.Tensor]], *, write: bool) -> Transfer:
        small, others = dict[Block, torch.Tensor](), list[list[Part]]()
        io = self._open_io(rows[0][0] if rows else "", write=write)
        for key, tensor in rows:
            parts = self._parts(key, tensor, None)
            if len(parts) == 1 and parts[0][0].size <= SMALL_BYTES and tensor.device.type == "cpu" and parts[0][0] not in small:
                small.update(parts)
            else:
                others += [[part] for part in parts]
        groups = self.layout.adjacent(small, min(ROW_BYTES, self.staging.cap_bytes))
        together = [[(block, small[block]) for block in group] for group in groups]
        return _started(io.begin_row(parts, write=write) for parts in [*together, *others])

    def _open_io(self, key: Key, *, write: bool) -> BlockIO:
        if os.getpid() != self._pid:
            raise StoreRequestError(
                f"this store belongs to process {self._pid}, which forked this one: make the model that uses it here, or start "
                "processes by spawn"
            )
        if self._closed or self._io is None:
            raise StoreRequestError(f"cannot {'write' if write else 'read'} extent {key!r}: the store is closed")
        return self._io

    def _parts(self, key: Key, tensor: torch.Tensor, offset: int | None) -> list[Part]:
        """Return the blocks that a transfer of an extent moves, each with its memory."""
        extent, data, start = self.layout.find(key), _bytes_of(tensor, key), offset or 0
        if offset is None and data.numel() != extent.size:
            raise StoreRequestError(
                f"a tensor of {data.numel():,} bytes for extent {key!r} of {extent.size:,}; for a part of it give offset= as well"
            )
        blocks = self.layout.find_blocks(extent, start if offset is None else offset, data.numel())
        return [(block, data[block.start - start : block.start - start + block.size]) for block in blocks]

    def _folder(self, block: Block) -> str:
        return self.folders[block.device]

    def _describe(self, block: Block) -> str:
        where = f"offset {block.offset:,} of the store's file in {self._folder(block)!r}"
        return f"bytes [{block.start:,}, {block.start + block.size:,}) of extent {block.key!r} ({where})"


def _started(begun: Iterable[Piece]) -> Transfer:
    """Begin the pieces of a transfer, as they are asked for; where one raises, those that have begun are finished first."""
    pieces: list[Piece] = []
    try:
        for piece in begun:
            pieces.append(piece)
    except BaseException:
        for piece in pieces:
            piece.finish()
        raise
    return Transfer(pieces)


def _bytes_of(tensor: torch.Tensor, key: Key) -> torch.Tensor:
    """View a tensor's memory as bytes."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type == "meta":
        found = f"a {tensor.layout} tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise StoreRequestError(
            f"extent {key!r} cannot move to or from {found}; accepted: a dense tensor on the CPU or an accelerator"
        )
    if not tensor.is_contiguous():
        raise StoreRequestError(
            f"extent {key!r}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
            "give the flat memory, or a contiguous copy"
        )
    with torch.inference_mode(False):  # a thread that isn't in that mode may fill it
        return tensor.detach().reshape(-1).view(torch.uint8)


def _warn_of(folder: str, file: File) -> None:
    concern = look_up(folder).concern
    if not concern and not file.direct:
        concern = "its filesystem refuses direct I/O: transfers go through the page cache, at the cost of memory and time"
    if concern:
        warnings.warn(f"states are kept in {folder!r}: {concern}", StoreWarning, stacklevel=3)


def close_all_stores() -> None:
    """Close every store of this process; what a drive doesn't finish is logged."""
    for store in list(_LIVE):
        try:
            store.close()
        except OSError as error:
            _log.error("a store was left as it is: %s", error)


def _let_go_in_child() -> None:
    for store in list(_LIVE):
        store.abandon()


os.register_at_fork(after_in_child=_let_go_in_child)
