"""Checksums of the store's blocks.

Computed while a block is written, kept in memory, compared at each read: they catch lost, misdirected and corrupted blocks.
Called by `block_io`; knows nothing of files.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable, Sequence

from zinf_compile.errors import StoreError, StoreRequestError

from .extents import Block

_NEVER, _INCOMPLETE, _WHOLE = range(3)
_WAY_OUT = (
    "load a checkpoint of model and optimizer, both from before that (load_full_state_dict, load_full_optimizer_state_dict), and "
    "go on from there"
)
"""Lost values are nowhere in memory; loaded values are written anew."""


class BlockChecks:
    """For each block its generation (how often it was written), and the CRC32C of this generation and of the one before.

    The checksums are computed from the memory that is written, and never stored beside the data. So a block that
    comes back as another block (misdirected), as an older generation (a write the drive lost) or with a bit changed has the
    wrong checksum; one that carried its own would look right in the first two cases. The older checksums tell the cases apart.

    Not locked: the store has at most one write, or any number of reads, of a block under way.
    """

    def __init__(self, blocks: Sequence[Block], *, describe: Callable[[Block], str], folder: Callable[[Block], str]) -> None:
        count = len(blocks)
        self._blocks = blocks
        self._describe = describe
        self._folder = folder
        self._state = bytearray(count)
        self._generation = array("L", bytes(count * array("L").itemsize))
        self._crc = array("L", bytes(count * array("L").itemsize))
        self._previous = array("L", bytes(count * array("L").itemsize))

    def generation(self, block: Block) -> int:
        """Return how often the block was written."""
        return self._generation[block.number]

    def begin_write(self, block: Block) -> None:
        """Mark the block incomplete: it holds neither the old nor the new content for certain."""
        self._state[block.number] = _INCOMPLETE

    def end_write(self, block: Block, crc: int | None) -> None:
        """Record that the block holds the next generation, with checksum `crc` where one was computed."""
        number = block.number
        self._generation[number] += 1
        self._previous[number], self._crc[number] = self._crc[number], crc or 0
        self._state[number] = _WHOLE

    def begin_read(self, block: Block) -> None:
        """Raise where there is nothing whole to read."""
        state = self._state[block.number]
        if state == _NEVER:
            raise StoreRequestError(f"{self._describe(block)} was never written; write it before reading it")
        if state == _INCOMPLETE:
            raise StoreError(
                errno.EIO,
                f"{self._describe(block)}: its last write failed or was interrupted, so neither the old nor the new bytes are "
                f"there for certain; {_WAY_OUT}",
                self._folder(block),
            )

    def end_read(self, block: Block, crc: int | None) -> None:
        """Compare the checksum of what was read; raise `StoreError` where it is another one. Nothing to compare: None."""
        expected = self._crc[block.number]
        if crc is None or crc == expected:
            return
        raise StoreError(
            errno.EBADMSG,
            f"{self._describe(block)}: the drive returned other bytes than were written: CRC32C {crc:08x}, not {expected:08x} of "
            f"generation {self._generation[block.number]}; {self._diagnose(block, crc)}; {_WAY_OUT}",
            self._folder(block),
        )

    def _diagnose(self, block: Block, crc: int) -> str:
        if self._generation[block.number] > 1 and crc == self._previous[block.number]:
            return "these are the bytes of the generation before: the last write was lost"
        for number, other in enumerate(self._crc):
            if other == crc and self._state[number] == _WHOLE:
                return f"these are the {self._describe(self._blocks[number])}: a read or write went to the wrong place"
        return "they were changed behind the store's back, or the drive is failing"
