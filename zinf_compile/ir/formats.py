"""Formats of values where they are stored, sent and added up, and the bytes that these take.

All bytes of states are counted here: of parameters, gradients and optimizer states, on any tier, between ranks and in buffers.
What is no state (an activation, a batch, a tensor of a file) may say its own `nbytes`.
"""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class StateFormat:
    """Elements of one data type, and for quantised ones a scale for each block of elements. Hashable; comparable by value."""

    dtype: torch.dtype
    """Of an element as it is kept, not of the value that it stands for."""
    block: int = 1
    """Consecutive elements that share a scale; the last block of a tensor may be shorter."""
    scales: torch.dtype | None = None
    """The type of the scales; None: elements are their own values."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"a block of {self.block} elements; accepted: 1 or more")
        if self.scales is None and self.block != 1:
            raise ValueError(f"blocks of {self.block} elements without scales; give the type of the scales, or a block of 1")

    def bytes(self, numel: int) -> int:
        """Return the bytes of `numel` elements that begin a block: the elements, and a scale for each block begun."""
        scales = 0 if self.scales is None else -(-numel // self.block) * self.scales.itemsize
        return numel * self.dtype.itemsize + scales

    def numel_within(self, size: int) -> int:
        """Return the most elements that take at most `size` bytes."""
        if self.scales is None:
            return size // self.dtype.itemsize
        blocks, rest = divmod(size, self.bytes(self.block))
        return blocks * self.block + max(0, rest - self.scales.itemsize) // self.dtype.itemsize

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element of a long tensor, its share of a scale included."""
        return self.bytes(self.block) / self.block


@functools.cache
def format_of(dtype: torch.dtype) -> StateFormat:
    """Return the format of values that are kept in a data type as they are."""
    return StateFormat(dtype)


def as_plain(stored: StateFormat) -> dict[str, str | int | None]:
    """Return a format as values of JSON: the names of its data types without `torch.`, and the elements of a block."""
    dtype, scales = (None if each is None else str(each).removeprefix("torch.") for each in (stored.dtype, stored.scales))
    return {"dtype": dtype, "block": stored.block, "scales": scales}


def is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Say whether elements of one type take fewer bytes than those of another."""
    return format_of(dtype).bytes(1) < format_of(other).bytes(1)
