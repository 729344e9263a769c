"""The stretch of memory that views of one storage cover: what moves when they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALIGNMENT = 64
"""Bytes. A stretch begins at a multiple, so that a value lies in its new memory as in its old one: kernels may choose by that."""


class ValueForm(NamedTuple):
    """Where a value lies in its storage, in elements."""

    shape: Sequence[int]
    stride: Sequence[int]
    offset: int
    itemsize: int

    @property
    def numel(self) -> int:
        """Elements from its first to its last one in memory, those between included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


def span_of(forms: Iterable[ValueForm]) -> tuple[int, int]:
    """Return the first byte of a storage that the values cover, down to the alignment, and the one behind the last."""
    ends = [(form.offset * form.itemsize, (form.offset + form.numel) * form.itemsize) for form in forms if form.numel]
    if not ends:
        return 0, 0
    return min(start for start, _ in ends) // ALIGNMENT * ALIGNMENT, max(end for _, end in ends)
