"""The layout of extents: blocks, dealt out over one file per device."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence

from zinf_compile.errors import StoreRequestError
from zinf_compile.ir.sizes import ROW_BYTES, SMALL_BYTES, round_up

Key = Hashable
"""Names an extent; by convention (unit, kind of state), such as `("h.0.weight", "exp_avg")`."""


FreeSpace = tuple[Hashable, int]
"""A filesystem, and the bytes that are free on it."""

_ROWS_PER_DEVICE = 8
"""Rows for each of several devices, at least: with fewer one of them would be far from its share."""

_SPARE_PART = 20
"""One in so many bytes of free space is used only where no other filesystem has space: its own records need some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A piece of an extent that is transferred and checked as one."""

    key: Key
    """The extent's."""
    number: int
    """Counts the blocks of all extents of the layout."""
    start: int
    """Offset of its first byte within the extent."""
    size: int
    device: int
    offset: int
    """Within the device's file, aligned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """A named run of bytes."""

    key: Key
    size: int
    blocks: tuple[Block, ...]


class Layout:
    """The layout of all extents, fixed from the start.

    An extent is cut into blocks of `block_bytes`, the last one shorter; each is padded to `alignment`. Of several devices each
    is dealt the blocks that keep its bytes nearest to its share, so that any large extent uses all of them at once; one that
    has no space left for a block gets none. `free`: for each device its filesystem and the bytes free there; by default there is
    always space.

    Small extents come first, in their order, in rows: those of one row lie next to one another on one device, so that one request
    moves any of them that follow each other.
    """

    def __init__(
        self,
        extents: Iterable[tuple[Key, int]],
        *,
        block_bytes: int,
        alignment: int,
        shares: Sequence[float] = (1.0,),
        free: Sequence[FreeSpace] | None = None,
    ) -> None:
        if block_bytes <= 0 or block_bytes % alignment:
            raise StoreRequestError(f"block_bytes={block_bytes} is not a positive multiple of the alignment, {alignment}")
        if not shares or not all(0 < share < float("inf") for share in shares):
            raise StoreRequestError(f"shares={list(shares)} are not positive numbers, one for each path")
        self.block_bytes = block_bytes
        self.file_bytes = [0] * len(shares)
        """Bytes of each device's file."""
        self._filesystems = [filesystem for filesystem, _ in free] if free else list(range(len(shares)))
        self._left = dict(free) if free else dict.fromkeys(self._filesystems, sys.maxsize)
        self._spare = {filesystem: left // _SPARE_PART for filesystem, left in self._left.items()}
        self.extents: dict[Key, Extent] = {}
        self.blocks: list[Block] = []
        sizes = dict[Key, int]()
        for key, size in extents:
            if key in sizes:
                raise StoreRequestError(f"extent {key!r} is laid out twice; each name may occur once")
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise StoreRequestError(f"extent {key!r} of {size!r} bytes; accepted: a number of bytes, 0 or more")
            sizes[key] = size
        self._alignment, self._shares = alignment, shares
        for row in self._rows(sizes):
            self._deal([(key, 0, sizes[key]) for key in row])
        blocks = {block.key: (block,) for block in self.blocks}
        for key, size in sizes.items():
            first = len(self.blocks)
            for start in range(0, size if key not in blocks else 0, block_bytes):
                self._deal([(key, start, min(block_bytes, size - start))])
            self.extents[key] = Extent(key=key, size=size, blocks=blocks.get(key) or tuple(self.blocks[first:]))

    def _rows(self, sizes: Mapping[Key, int]) -> list[list[Key]]:
        """Return the small extents by row: of several devices each can be dealt some."""
        small = {
            key: round_up(size, self._alignment) for key, size in sizes.items() if 0 < size <= min(SMALL_BYTES, self.block_bytes)
        }
        devices = len(self._shares)
        most = ROW_BYTES if devices == 1 else min(ROW_BYTES, sum(small.values()) // (_ROWS_PER_DEVICE * devices))
        rows: list[list[Key]] = []
        room = 0
        for key, padded in small.items():
            if padded > room:
                rows.append([])
                room = max(padded, most)
            rows[-1].append(key)
            room -= padded
        return rows

    def _deal(self, row: Sequence[tuple[Key, int, int]]) -> None:
        """Put blocks, (extent, start within it, size), next to one another on a device."""
        padded = sum(round_up(size, self._alignment) for _, _, size in row)
        left = [self._left[filesystem] - padded for filesystem in self._filesystems]
        spare = [self._spare[filesystem] for filesystem in self._filesystems]
        devices = range(len(self._shares))
        roomy = [d for d in devices if left[d] >= spare[d]] or [d for d in devices if left[d] >= 0] or devices
        device = min(roomy, key=lambda d: (self.file_bytes[d] + padded) / self._shares[d])
        self._left[self._filesystems[device]] -= padded
        for key, start, size in row:
            offset = self.file_bytes[device]
            self.file_bytes[device] += round_up(size, self._alignment)
            self.blocks.append(Block(key=key, number=len(self.blocks), start=start, size=size, device=device, offset=offset))

    def adjacent(self, blocks: Iterable[Block], most: int) -> list[list[Block]]:
        """Group small blocks by what one request may move: neighbours on a device, of at most `most` bytes together."""
        groups: list[list[Block]] = []
        end, room = (-1, -1), 0
        for block in sorted(blocks, key=lambda block: block.number):
            padded = round_up(block.size, self._alignment)
            if (block.device, block.offset) != end or padded > room:
                groups.append([])
                room = max(padded, most)
            groups[-1].append(block)
            end, room = (block.device, block.offset + padded), room - padded
        return groups

    def find(self, key: Key) -> Extent:
        """Return the extent named `key`; raise `StoreRequestError` where there is none."""
        try:
            return self.extents[key]
        except (KeyError, TypeError):
            some = ", ".join(map(repr, list(self.extents)[:3]))
            raise StoreRequestError(
                f"unknown extent {key!r}; the store was laid out with {len(self.extents)}: {some}, ..."
            ) from None

    def find_blocks(self, extent: Extent, start: int, size: int) -> tuple[Block, ...]:
        """Return the blocks that make up the bytes [start, start + size); raise `StoreRequestError` where none do exactly."""
        if isinstance(start, bool) or not isinstance(start, int):
            raise StoreRequestError(f"offset={start!r} into extent {extent.key!r} is not a number of bytes")
        end = start + size
        if start < 0 or size < 0 or end > extent.size:
            raise StoreRequestError(f"range [{start}, {end}) of extent {extent.key!r} is outside its {extent.size:,} bytes")
        if size and (start % self.block_bytes or (end % self.block_bytes and end != extent.size)):
            raise StoreRequestError(
                f"range [{start}, {end}) of extent {extent.key!r} cuts through a block: it must begin at a multiple of "
                f"{self.block_bytes:,} bytes and end at one or at the extent's end, {extent.size:,}"
            )
        return extent.blocks[start // self.block_bytes : -(-end // self.block_bytes)] if size else ()
