"""The sizes and modes that decide a model's bits, beside its own operators and the types of its states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from .program import ParameterSlot

BUCKET_BYTES = 32 << 20
"""Of full parameters that are gathered together, where nobody says otherwise and tiles are no smaller. Measured
(benchmarks/prefetch.py, two gloo ranks on two cores): 8 MiB cost 3 to 5 %, 64 MiB gain nothing."""

LEAST_TILE = 1 << 20
"""Smallest default tile under `device_memory`: smaller ones cost more than they save."""

PIECE_NUMEL = 4 << 20
"""Elements of a piece of a shard: large enough for a drive's full speed, small beside what a process has."""

LEAST_PIECE_NUMEL = 1 << 18
"""Of a small model: as little as drives are still fast with."""

PIECES = 32
"""Pieces of a small model, at least, where they are no smaller than that: a step has one of each state in memory at a time."""

BYTES_PER_PIECE_ELEMENT = 512
"""Of a cap, for each element of a piece."""

CHUNK_BYTES = 256 * 2**20
"""Of a chunk's logits in fp32. Measured on a head of 262,144 classes and width 768, run operator by operator: 64, 128 and 256 MiB
take 1.5, 1.2 and 1.05 of the CPU time of eager's head and loss, as each chunk reads and writes the gradient of the weight once;
128 and 256 take 0.05 and 0.1 of its memory."""

WORTH_BYTES = 256 * 2**20
"""Logits that would take more bytes in fp32 are computed in chunks where nobody says otherwise."""


def tile_range(device_memory: int) -> tuple[int, int]:
    """Return the smallest and largest device_memory with the same default tile; (0, n): below it there is no default tile."""
    if device_memory < 4 * LEAST_TILE:
        return 0, 4 * LEAST_TILE
    first = 1 << (device_memory.bit_length() - 1)
    return first, 2 * first


def default_tile(device_memory: int) -> int | None:
    """Return the bytes of a tile where nobody says otherwise; None: no parameter is cut."""
    return tile_range(device_memory)[0] // 4 or None


def smaller_ranges(device_memory: int) -> Iterator[int]:
    """Yield the first device_memory of each `tile_range` below that of this one, the largest first."""
    first, _ = tile_range(device_memory)
    while first > 4 * LEAST_TILE:
        first //= 2
        yield first


def piece_of(numel: int, device_memory: int | None = None) -> int:
    """Return the elements of a piece where a rank's shards have `numel` in all, and nobody says otherwise: a power of two.

    Under a cap no more than leaves room for three chunks at a time, with which reads, updates and writes overlap: with three
    fp32 states and a 16-bit parameter and gradient they have a tenth of it. The same between two caps of `tile_range`.
    """
    most = PIECE_NUMEL if device_memory is None else tile_range(device_memory)[0] // BYTES_PER_PIECE_ELEMENT
    return min(PIECE_NUMEL, max(LEAST_PIECE_NUMEL, min(most, 1 << max(0, (numel // PIECES).bit_length() - 1))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeShape:
    """The division of compute. Made once for each compiled graph, from declared options.

    Within one shape no placement and no cap changes a bit; two shapes may differ in rounding.
    """

    bucket_bytes: int
    """Of full parameters that are gathered together; where regions end."""
    tile_bytes: int | None
    """Of the tiles of a larger parameter; None: none is cut."""
    piece_numel: int = PIECE_NUMEL
    """Elements of a shard that an optimizer updates at a time: a fused one divides each piece over threads by itself."""
    chunk_bytes: int = CHUNK_BYTES
    """Of a chunk's logits in fp32, where a loss is computed in chunks."""
    worth_bytes: int = WORTH_BYTES
    """Logits of more bytes in fp32 are computed in chunks, where `chunk_loss` doesn't say."""
    token_tile: int | None = None
    """Bytes of the widest value of a slice of tokens, where MLPs are computed a slice at a time; None: none is."""
    chunk_loss: bool | None = None
    """Whether losses are computed in chunks; None: large ones."""
    compute: str
    """fx or inductor."""
    mode: str
    """Inductor's."""

    def bucket_of(self, slots: Iterable[ParameterSlot]) -> int:
        """Return the bytes that move together in a graph: no more than a tile, where some parameter is cut into tiles."""
        if self.tile_bytes is None or not any(slot.tiles for slot in slots):
            return self.bucket_bytes
        return min(self.bucket_bytes, self.tile_bytes)

    def text(self) -> str:
        """Return the shape in one line, as `zinf dump` prints it."""
        tile = "none" if self.tile_bytes is None else f"{self.tile_bytes:,} bytes"
        losses = {None: f"above {self.worth_bytes:,} bytes of logits", True: "all losses", False: "no loss"}[self.chunk_loss]
        mode = f" ({self.mode})" if self.compute == "inductor" else ""
        return (
            f"compute shape: {self.compute}{mode}, bucket {self.bucket_bytes:,} bytes, tile {tile}, piece {self.piece_numel:,} "
            f"elements, chunk {self.chunk_bytes:,} bytes ({losses})"
            + ("" if self.token_tile is None else f", slice of tokens {self.token_tile:,} bytes")
        )

    def values(self) -> dict[str, object]:
        """Return the values by name, for JSON; without those of slices of tokens where there are none."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if name != "token_tile" or value is not None}
