"""Shards of a row of units on drives, each in pieces.

`NvmeBacking` is one of them. Knows no unit.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Iterator, Sequence

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.ir.pieces import cut_pieces
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.link_meter import READ, WRITTEN, Meter
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.stores import move_together, open_store


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSpec:
    """Size and type of one shard."""

    name: str
    """The parameter's name, for messages."""
    numel: int
    dtype: torch.dtype
    cuts: tuple[int, ...] = ()
    """Further borders of pieces, where parts are read and written by themselves."""


ShardRange = tuple[int, torch.Tensor, int]
"""A shard's number, host memory for the shard or for whole pieces of it, and the element that this begins with."""


class NvmeShards:
    """Keeps one kind of state of some units: extents for each shard, in pieces of `piece_numel` elements.

    All space is reserved before the constructor returns. The files are freed with the object.
    """

    def __init__(
        self,
        paths: Sequence[str],
        kind: str,
        specs: Sequence[ShardSpec],
        engine: Engine,
        meter: Meter,
        staging: BufferPool,
        *,
        piece_numel: int,
        tier: Tier = Tier.NVME,
    ) -> None:
        self.kind = kind
        self.tier = tier
        self._meter = meter
        self.specs = tuple(specs)
        self._pieces = [cut_pieces(spec.numel, piece_numel=piece_numel, cuts=spec.cuts) for spec in specs]
        self.store = open_store(
            tier,
            paths,
            [
                (self._key(index, piece), format_of(spec.dtype).bytes(end - start))
                for index, spec in enumerate(specs)
                for piece, (start, end) in enumerate(self._pieces[index])
            ],
            engine,
            staging,
        )
        weakref.finalize(self, self.store.close).atexit = False  # at exit the kernel frees the files

    def read(self, index: int, into: torch.Tensor, start: int = 0) -> Pending:
        """Start to read a shard into host memory of its size, or the pieces of it that begin at `start`."""
        return self.move_together([(index, into, start)], write=False)

    def write(self, index: int, source: torch.Tensor, start: int = 0) -> Pending:
        """Start to write a shard from host memory, or the pieces of it that begin at `start`."""
        return self.move_together([(index, source, start)], write=True)

    def blocks(self, index: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the blocks, in elements, that hold the elements [first, last) of a shard: each can be read by itself."""
        step = format_of(self.specs[index].dtype).numel_within(self.store.block_bytes)
        return [
            (begin, min(begin + step, end))
            for start, end in self._pieces[index]
            for begin in range(start, end, step)
            if begin < last and first < min(begin + step, end)
        ]

    def read_block(self, index: int, start: int, into: torch.Tensor) -> Pending:
        """Start to read the block that begins at element `start`."""
        piece = bisect.bisect(self._pieces[index], start, key=lambda span: span[0]) - 1
        offset = format_of(into.dtype).bytes(start - self._pieces[index][piece][0])
        return self._meter.follow(
            READ, into.nbytes, self.store.read(self._key(index, piece), into, offset=offset), self._what(index)
        )

    def move_together(self, rows: Sequence[ShardRange], *, write: bool) -> Pending:
        """Start to read parts of several shards, or to write them, by as few requests as the store knows how to."""
        parts = [part for row in rows for part in self._parts(*row)]
        moving = move_together(self.store, parts, write=write)
        first, last, count = rows[0][0], rows[-1][0], sum(tensor.nbytes for _, tensor, _ in rows)
        what = self._what(first) + ("" if len(rows) == 1 else f" .. {self.specs[last].name}")
        return self._meter.follow(WRITTEN if write else READ, count, moving, what)

    def _parts(self, index: int, flat: torch.Tensor, offset: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the extents of the pieces that a tensor holds from element `offset` on, each with its part."""
        pieces, last = self._pieces[index], offset + flat.numel()
        first = bisect.bisect_left(pieces, (offset, offset))
        for piece, (start, end) in enumerate(pieces[first:], first):
            if start >= last:
                return
            yield self._key(index, piece), flat[start - offset : end - offset]

    def _what(self, index: int) -> str:
        return f"{self.kind} {self.specs[index].name}"

    def _key(self, index: int, piece: int) -> str:
        part = f", piece {piece}" if len(self._pieces[index]) > 1 else ""
        return f"{self.kind} {self.specs[index].name} (unit {index}{part})"
