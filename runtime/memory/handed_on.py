"""What a forward leaves on the device for its backward, which would bring it again: full units, or shards on several ranks."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable

import torch

from zinf_compile.ir.program import SlotKey
from zinf_compile.runtime.system.accelerator import current_stream


@dataclasses.dataclass(eq=False)
class HandedOn:
    """What the backward of one forward finds."""

    wanted: frozenset[tuple[SlotKey, torch.dtype]] = frozenset()
    """The units that it finds there, see `Program.finds`."""
    shards: bool = False
    """Whether it finds their shards alone, as on several ranks, which gather alike."""


class Handed:
    """Values of a rank that are there until a backward takes them, or another graph begins. Any thread may call."""

    def __init__(self) -> None:
        self._values: weakref.WeakKeyDictionary[object, tuple[torch.Tensor, torch.Stream | None]] = weakref.WeakKeyDictionary()
        """With the stream on which each was allocated and filled; None on the CPU."""
        self._tiles: weakref.WeakKeyDictionary[object, weakref.WeakSet[object]] = weakref.WeakKeyDictionary()
        """Of each unit, the tiles that were handed on."""
        self.used = False
        """Whether there may be one, for who asks at each parameter of a step."""
        self._lock = threading.RLock()  # a unit that is dropped may call from inside

    def __bool__(self) -> bool:
        """Say whether there is one."""
        return self.used and bool(self._values)

    def __contains__(self, unit: object) -> bool:
        """Say whether a unit's present values are there, in whatever type."""
        return unit in self._values

    def keep(self, unit: object, value: torch.Tensor, *, tile: object | None = None) -> None:
        """Keep the values of a unit, or of a tile of it."""
        with self._lock:
            self.used = True
            self._values[unit if tile is None else tile] = value, current_stream(value.device)
            if tile is not None:
                self._tiles.setdefault(unit, weakref.WeakSet()).add(tile)

    def take(self, unit: object, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a unit's values and have them no longer; None where they aren't there in this type, for the current stream."""
        with self._lock:
            value, stream = self._values.get(unit, (None, None))
            if value is None or value.dtype != dtype or stream != current_stream(value.device):
                return None  # its memory comes back in the order of its own stream
            self.drop(unit)
            return value

    def end(self, but: Callable[[], Iterable[object]] = tuple) -> None:
        """Have none, `but` those of the units that the graph finds which is about to run."""
        if self.used:
            with self._lock:
                ended = set(self._values) - set(but())
            for unit in ended:
                self.drop(unit)

    def drop(self, unit: object) -> None:
        """Have no values of a unit, or of its tiles, that are about to change."""
        if self.used:
            with self._lock:
                for tile in self._tiles.pop(unit, ()):
                    self.drop(tile)
                self._values.pop(unit, None)
                self.used = bool(self._values)

    @property
    def bytes(self) -> int:
        """The bytes of all of them."""
        with self._lock:
            return sum(value.nbytes for value, _ in self._values.values())
