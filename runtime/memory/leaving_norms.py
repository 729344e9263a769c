"""Norms of gradients that leave their device, taken there before they do: for who asks for them behind each backward.

Clipping reads the norm of each gradient, for which one that has left would be brought back. Once somebody has asked for such a
norm, the next backwards take it of what they are about to send away; a step without a question ends that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from zinf_compile.runtime.lanes.lanes import Pending

MOST = 4
"""Questions that are remembered."""
TOGETHER = 64
"""Norms in one piece of memory: a device gives out no less than 512 bytes."""


@dataclasses.dataclass(frozen=True)
class Norms:
    """Which norms are asked for."""

    key: Hashable
    """Equal where the same is asked for."""
    dtype_of: Callable[[Any, torch.dtype], torch.dtype | None]
    """Takes a unit, or a tile, and the type of its reduced shard; returns that of the norm, or None where it isn't taken."""
    take: Callable[[Any, torch.Tensor, torch.Tensor], object]
    """Takes a unit, or a tile, its reduced shard, and memory for the norm."""


class LeavingNorm:
    """The norm of one reduced shard, on the device."""

    __slots__ = ("key", "ready", "value")

    def __init__(self, key: Hashable, value: torch.Tensor) -> None:
        self.key = key
        self.value: torch.Tensor | None = value
        """None where the device had no memory to take it."""
        self.ready: Pending | None = None
        """What it is there behind; None: the caller's order."""

    def get(self) -> torch.Tensor | None:
        """Return the value for the current stream."""
        if self.ready is not None:
            self.ready.wait()
        return self.value


class Taking:
    """Norms of some shards, which are taken as soon as these are reduced."""

    def __init__(self, rows: Sequence[tuple[Norms, object, torch.Tensor, LeavingNorm]]) -> None:
        self._rows, self._norms = list(rows), [norm for *_, norm in rows]

    def take(self) -> None:
        """Take them, on the thread and the stream on which the shards are reduced."""
        rows, self._rows = self._rows, []
        for norms, unit, shard, norm in rows:
            assert norm.value is not None, "it is taken once"
            try:
                norms.take(unit, shard, norm.value)
            except torch.OutOfMemoryError:
                norm.value = None

    def behind(self, reduction: Pending) -> None:
        """Note what they are there behind."""
        for norm in self._norms:
            norm.ready = reduction


class LeavingNorms:
    """The norms of one rank."""

    def __init__(self) -> None:
        self._wanted: dict[Hashable, Norms] = {}
        self._asked: dict[Hashable, Norms] = {}
        """For which somebody has asked since the last step."""
        self._by_shard = WeakTensorKeyDictionary()
        self._places: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        """Memory for the next norms."""

    @property
    def are_wanted(self) -> bool:
        """Whether backwards take norms."""
        return bool(self._wanted)

    def want(self, norms: Norms) -> None:
        """Have norms taken by the next backwards."""
        if norms.key not in self._asked and len(self._asked) < MOST:
            self._asked[norms.key] = self._wanted[norms.key] = norms

    def end_step(self) -> None:
        """Take no more of those for which nobody has asked since the last step."""
        self._wanted, self._asked = self._asked, {}
        self._places.clear()

    def begin(self, leaving: Sequence[tuple[object, torch.Tensor]]) -> Taking | None:
        """Make ready to take the norms of units' or tiles' shards that are about to leave; None where none is taken."""
        found = []
        for norms in list(self._wanted.values()):
            for unit, shard in leaving:
                dtype = norms.dtype_of(unit, shard.dtype)
                value = None if dtype is None else self._place(shard, dtype)
                if value is not None:
                    norm = LeavingNorm(norms.key, value)
                    found.append((norms, unit, shard, norm))
                    self._by_shard[shard] = (*self.of(shard), norm)
        return Taking(found) if found else None

    def _place(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for a norm, on the device of a shard, in one piece with that for others; None where there is none."""
        key = shard.device, dtype
        left = self._places.pop(key, None)
        if not left:
            try:
                left = list(shard.new_empty(TOGETHER, dtype=dtype).unbind())
            except torch.OutOfMemoryError:
                return None
        value = left.pop()
        if left:  # else all of it goes with the norms
            self._places[key] = left
        return value

    def of(self, shard: torch.Tensor) -> tuple[LeavingNorm, ...]:
        """Return the norms of a shard that leaves now."""
        return self._by_shard.get(shard, ()) if self._by_shard else ()
