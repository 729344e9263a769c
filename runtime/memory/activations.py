"""What graphs have handed out and autograd or the caller still holds: saved values and results, by their storages.

The memory is PyTorch's. A call of a graph adds its record; what was dropped meanwhile is forgotten at the next look.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Kept(NamedTuple):
    """A storage that a graph returned."""

    reference: StorageWeakRef
    bytes: int
    maker: Hashable
    """Whose graph returned it to the caller alone; None where a backward needs it."""
    reservations: frozenset[int]
    """The reservations of the graph and of those whose results it read, by their identities."""


class Activations:
    """Counts the bytes that outputs of graphs keep alive on a device, each storage once."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._leaves: set[int] = set()
        """Of these, storages of leaves that need gradients."""
        self.peak = 0
        """The most that was held when a graph returned."""

    def add(
        self,
        outputs: Iterable[Any],
        device: torch.device,
        *,
        given: frozenset[int] = frozenset(),
        results: int | None = None,
        maker: Hashable = None,
        reservations: frozenset[int] = frozenset(),
    ) -> None:
        """Count a graph's outputs on a device, without the storages that were `given` to it.

        `results`: the number of outputs that the caller gets, the rest are saved for the backward; None: all. `maker`: the same
        for all variants of one graph, as for other shapes. `reservations`: the identities of the graph's reservations.
        """
        reservations |= self.behind(given)
        for number, value in enumerate(outputs):
            if _is_plain(value) and value.device.type == device.type:
                storage = value.untyped_storage()
                size = storage.nbytes()
                if size and storage._cdata not in given:
                    is_result = results is None or number < results
                    self._kept[storage._cdata] = _Kept(StorageWeakRef(storage), size, maker if is_result else None, reservations)
        self.peak = max(self.peak, self.held())

    def held(self, *, given: frozenset[int] = frozenset()) -> int:
        """Return the bytes that are still held, without the storages that are `given` to the graph that asks."""
        self._forget()
        return sum(kept.bytes for key, kept in self._kept.items() if key not in given)

    def returned_by(self, maker: Hashable, *, given: frozenset[int] = frozenset()) -> int:
        """Return the bytes of these that variants of one graph returned, and that no backward needs; 0 for the maker None."""
        self._forget()
        mine = {key: kept for key, kept in self._kept.items() if kept.maker == maker is not None}
        return sum(kept.bytes for key, kept in mine.items() if key not in given)

    def behind(self, given: frozenset[int]) -> frozenset[int]:
        """Return the reservations of graphs whose backward comes after that of a graph with these storages among its inputs."""
        self._forget()
        return frozenset().union(*(self._kept[key].reservations for key in given & self._kept.keys()))

    def leaves(self, inputs: Iterable[Any]) -> int:
        """Return the bytes of results that became leaves that need gradients, as `inputs` of this graph or of an earlier one."""
        self._forget()
        found = {v.untyped_storage()._cdata for v in inputs if _is_plain(v) and v.is_leaf and v.requires_grad}
        self._leaves |= found & self._kept.keys()
        return sum(self._kept[key].bytes for key in self._leaves)

    def _forget(self) -> None:
        for key in [key for key, kept in self._kept.items() if kept.reference.expired()]:
            del self._kept[key]
            self._leaves.discard(key)


def storages_of(values: Iterable[Any]) -> frozenset[int]:
    """Return the identities of the storages of tensors among `values`; hollow parameters have none that counts."""
    return frozenset(value.untyped_storage()._cdata for value in values if _is_plain(value))


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    return type(value) in (torch.Tensor, torch.nn.Parameter)
