"""Full units that stay on the device: until their values change, so that a step gathers each once, for
`reshard_after_backward=False`; or from the end of a forward to their use in its backward, as tiles do, too.

Note: present values
    A copy is made by the first gather behind a change, and dropped by the next change: by `Unit.changing` and
    `begin_replacing`, and at the beginning of a step of an optimizer that has the parameter. A unit whose shard was handed out,
    to be changed unseen perhaps, has no copy from then on. Ranks compare which ones they have before each run of a graph, and
    gather all of its units anew where they differ.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from zinf_compile.runtime.system.accelerator import current_stream

from .handed_on import Handed


class Copied(Protocol):
    """A `Unit`, as far as ranks compare which ones have copies."""

    serial: int


class _Copy:
    def __init__(self, full: torch.Tensor) -> None:
        self.full = full
        self.stream = current_stream(full.device)
        """The stream on which it was allocated and gathered; None on the CPU."""
        self.gathered = None if self.stream is None else self.stream.record_event()
        self.readers: set[torch.Stream] = set()
        """Other streams that read it."""

    def read(self) -> torch.Tensor:
        """Return it for the current stream, which comes after the gather."""
        stream = current_stream(self.full.device)
        if stream is not None and stream != self.stream and self.gathered is not None:
            stream.wait_event(self.gathered)
            self.readers.add(stream)
        return self.full

    def end(self) -> None:
        """Let its memory, which is freed in the order of its own stream, come after its readers."""
        for reader in self.readers:
            assert self.stream is not None, "readers are streams, too"
            self.stream.wait_event(reader.record_event())


class FullCopies:
    """The full units of a rank that stay, each in the type of the gather that made it. Any thread may call."""

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[object, _Copy] = weakref.WeakKeyDictionary()
        self._handed_on = Handed()
        """Those that are there until a backward takes them, or another graph begins."""
        self._shards = Handed()
        """Shards alone that are."""
        self._handed_out: weakref.WeakSet[object] = weakref.WeakSet()
        self._lock = threading.RLock()  # a unit that is dropped may call from inside

    def __bool__(self) -> bool:
        """Say whether there is one, or a shard."""
        return bool(self._copies) or bool(self._handed_on) or bool(self._shards)

    def holds(self, unit: object) -> bool:
        """Say whether a unit's present values are there, in whatever type."""
        return unit in self._copies or unit in self._handed_on

    def find(self, unit: object, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a unit's present values in a type, in the parameter's shape, for the current stream; None: they aren't there."""
        copy = self._copies.get(unit)
        if copy is None:
            return self._handed_on.take(unit, dtype)
        return copy.read() if copy.full.dtype == dtype else None

    def keep(self, unit: object, full: torch.Tensor) -> None:
        """Keep a unit that the current stream has gathered, in memory that nothing else uses; the first of several types."""
        if unit in self._handed_out or self.holds(unit):
            return
        with self._lock:
            self._copies[unit] = _Copy(full)

    def hand_on(self, unit: object, full: torch.Tensor, *, tile: object | None = None) -> None:
        """Keep a unit, or a tile of it, until a backward takes it, by `find`, or `end_handed_on`."""
        with self._lock:
            if not self.holds(unit if tile is None else tile) and unit not in self._handed_out:
                self._handed_on.keep(unit, full, tile=tile)

    def hand_on_shard(self, unit: object, shard: torch.Tensor, *, tile: object | None = None) -> None:
        """Keep the shard of a unit, or of a tile of it, until a backward takes it, by `take_shard`, or `end_handed_on`."""
        with self._lock:
            if unit not in self._handed_out:
                self._shards.keep(unit, shard, tile=tile)

    def take_shard(self, unit: object, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a shard that was handed on, for the current stream; None: it isn't there."""
        return self._shards.take(unit, dtype)

    def end_handed_on(self, but: Callable[[], Iterable[object]] = tuple) -> None:
        """Have no unit that was handed on, `but` those that the graph finds which is about to run."""
        self._handed_on.end(but)
        self._shards.end(but)

    def drop(self, unit: object) -> None:
        """Have no copy of a unit, or of its tiles, whose values are about to change."""
        if self._handed_on.used:
            self._handed_on.drop(unit)
        if self._shards.used:
            self._shards.drop(unit)
        if self._copies:
            with self._lock:
                copy = self._copies.pop(unit, None)
            if copy is not None:
                copy.end()

    def hand_out(self, unit: object) -> None:
        """Have no copy of a unit any more: others get its shard, and may change it unseen at any time."""
        with self._lock:
            self._handed_out.add(unit)
        self.drop(unit)

    def digest(self, units: Iterable[Copied]) -> int:
        """Return a hash, of 32 bits, of those units that have a copy; 0: none has."""
        serials = sorted({unit.serial for unit in units if unit in self._copies}) if self._copies else ()
        return zlib.crc32(",".join(map(str, serials)).encode()) or 1 if serials else 0

    @property
    def handed_on_bytes(self) -> int:
        """The bytes of those that a backward is about to take."""
        return self._handed_on.bytes + self._shards.bytes

    @property
    def bytes(self) -> int:
        """The bytes of all of them."""
        with self._lock:
            return self.handed_on_bytes + sum(copy.full.nbytes for copy in self._copies.values())
