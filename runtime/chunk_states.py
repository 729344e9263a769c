"""Chunks of optimizer states on drives, of which a few at a time are in memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import torch

from zinf_compile.errors import StoreError

from .buffers import aligned_buffer
from .store import PathLike, Store, Transfer

SLOTS = 3
"""Chunks in memory: one being read, one being updated, one being written."""

_PAGE = 4096


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """What one chunk holds: `numel` elements of each of these states."""

    name: str
    numel: int
    states: Mapping[str, torch.dtype]


class _Slot:
    def __init__(self, size: int) -> None:
        self.buffer = aligned_buffer(size)
        self.chunk: int | None = None
        self.under_way: list[Transfer] = []

    def settle(self) -> None:
        """Wait until nothing moves to or from the slot; where that failed, what it holds counts for nothing."""
        transfers, self.under_way = self.under_way, []
        try:
            for transfer in transfers:
                transfer.wait()
        except BaseException:
            self.chunk = None
            raise


class ChunkStates:
    """Lends the states of one chunk after the other, and writes them back.

    `prepare` starts to read a chunk, `take` waits for it and returns its states as flat tensors, in the memory that `give_back`
    writes from: what was changed in place moves without a copy. The chunks used last stay in memory until the room is needed. All
    space on the drives is reserved before the constructor returns. Errors of the drives are `StoreError`s that name the chunk.
    """

    def __init__(self, paths: Sequence[PathLike], chunks: Sequence[ChunkSpec]) -> None:
        self._chunks = chunks
        self._slots: list[_Slot] = []  # the one used last at the end
        self._written: set[int] = set()
        self.store = Store(
            paths,
            [
                (_key(chunk.name, state), chunk.numel * dtype.itemsize)
                for chunk in chunks
                for state, dtype in chunk.states.items()
            ],
        )
        size = max(_place(chunk)[1] for chunk in chunks)
        self._slots = [_Slot(size) for _ in range(min(SLOTS, len(chunks)))]
        self.memory_bytes = size * len(self._slots)

    @property
    def drive_bytes(self) -> int:
        """Bytes of all states."""
        return sum(chunk.numel * dtype.itemsize for chunk in self._chunks for dtype in chunk.states.values())

    def prepare(self, number: int) -> None:
        """Start to read a chunk, unless it is in memory or was never written."""
        self._slot_of(number)

    def take(self, number: int) -> dict[str, torch.Tensor]:
        """Return the states of a chunk by name; undefined where the chunk was never written."""
        slot = self._slot_of(number)
        slot.settle()
        self._slots.remove(slot)
        self._slots.append(slot)
        return self._views(slot, number)

    def give_back(self, number: int) -> None:
        """Start to write a chunk that was taken."""
        slot = next(slot for slot in self._slots if slot.chunk == number)
        spec = self._chunks[number]
        slot.under_way += [self.store.write(_key(spec.name, state), view) for state, view in self._views(slot, number).items()]
        self._written.add(number)

    def forget(self, number: int) -> None:
        """Make a chunk as if never written, whatever the drive would say of it."""
        for slot in self._slots:
            if slot.chunk == number:
                with contextlib.suppress(StoreError):
                    slot.settle()
                slot.chunk = None
        self._written.discard(number)

    def close(self) -> None:
        """Wait for what is under way and free the space."""
        self.store.close()
        self._slots.clear()

    def _slot_of(self, number: int) -> _Slot:
        for slot in self._slots:
            if slot.chunk == number:
                return slot
        slot = self._slots[0]
        slot.settle()
        self._slots.remove(slot)
        self._slots.append(slot)
        slot.chunk = number
        if number in self._written:
            spec = self._chunks[number]
            slot.under_way += [self.store.read(_key(spec.name, state), view) for state, view in self._views(slot, number).items()]
        return slot

    def _views(self, slot: _Slot, number: int) -> dict[str, torch.Tensor]:
        spec = self._chunks[number]
        places, _ = _place(spec)
        return {
            state: slot.buffer[places[state] :][: spec.numel * dtype.itemsize].view(dtype) for state, dtype in spec.states.items()
        }


def _key(chunk: str, state: str) -> str:
    return f"{state} of {chunk}"


def _place(chunk: ChunkSpec) -> tuple[dict[str, int], int]:
    """Lay the states of a chunk out in a slot, each from a page; return where each begins, and the bytes of all."""
    places: dict[str, int] = {}
    end = 0
    for state, dtype in chunk.states.items():
        places[state] = end
        end += -(-chunk.numel * dtype.itemsize // _PAGE) * _PAGE
    return places, end
