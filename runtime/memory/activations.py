"""What graphs have handed out and autograd or the caller still holds: saved values and results, by their storages.

The memory is PyTorch's. A call of a graph adds its record; what was dropped meanwhile is forgotten at the next look.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Activations:
    """Counts the bytes that outputs of graphs keep alive on a device, each storage once."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StorageWeakRef, int, Hashable]] = {}
        """A reference, the bytes, and whose graph made it."""
        self._leaves: set[int] = set()
        """Of these, storages of leaves that need gradients."""
        self.peak = 0
        """The most that was held when a graph returned."""

    def add(
        self, outputs: Iterable[Any], device: torch.device, *, given: frozenset[int] = frozenset(), maker: Hashable = None
    ) -> None:
        """Count a graph's outputs on a device, without the storages that were `given` to it.

        `maker`: the same for all variants of one graph, as for other shapes.
        """
        for value in outputs:
            if _is_plain(value) and value.device.type == device.type:
                storage = value.untyped_storage()
                size = storage.nbytes()
                if size and storage._cdata not in given:
                    self._kept[storage._cdata] = StorageWeakRef(storage), size, maker
        self.peak = max(self.peak, self.held())

    def held(self, *, given: frozenset[int] = frozenset()) -> int:
        """Return the bytes that are still held, without the storages that are `given` to the graph that asks."""
        self._forget()
        return sum(size for key, (_, size, _) in self._kept.items() if key not in given)

    def made_by(self, maker: Hashable, *, given: frozenset[int] = frozenset()) -> int:
        """Return the bytes of these that variants of one graph made."""
        self._forget()
        return sum(size for key, (_, size, who) in self._kept.items() if who == maker and key not in given)

    def leaves(self, inputs: Iterable[Any]) -> int:
        """Return the bytes of results that became leaves that need gradients, as `inputs` of this graph or of an earlier one."""
        self._forget()
        found = {v.untyped_storage()._cdata for v in inputs if _is_plain(v) and v.is_leaf and v.requires_grad}
        self._leaves = (self._leaves | found) & self._kept.keys()
        return sum(self._kept[key][1] for key in self._leaves)

    def _forget(self) -> None:
        for key in [key for key, (reference, *_) in self._kept.items() if reference.expired()]:
            del self._kept[key]


def storages_of(values: Iterable[Any]) -> frozenset[int]:
    """Return the identities of the storages of tensors among `values`; hollow parameters have none that counts."""
    return frozenset(value.untyped_storage()._cdata for value in values if _is_plain(value))


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    return type(value) in (torch.Tensor, torch.nn.Parameter)
