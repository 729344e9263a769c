"""Parameters that compiled graphs have used, and that stay ordinary ones because nothing would move."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zinf_compile.runtime.system.process_wide import process_wide

_ordinary: dict[int, StorageWeakRef] = process_wide({})
"""By the address of a parameter's storage, which no other gets while it is referred to. The parameter itself is not referred to:
PyTorch swaps no tensors that have weak references, as a change of a model's type may."""


def has_memory(parameter: torch.Tensor) -> bool:
    """Say whether it may be noted: sparse ones have no storage."""
    return parameter.layout == torch.strided


def address_of(parameter: torch.Tensor) -> int:
    """Return the address of the storage of one that has memory, or once had some."""
    return parameter.untyped_storage()._cdata


def note_ordinary(parameters: Iterable[torch.Tensor]) -> None:
    """Note that a compiled graph has used these, at its first call with them."""
    for address in [address for address, reference in _ordinary.items() if reference.expired()]:
        del _ordinary[address]
    for parameter in parameters:
        storage = parameter.untyped_storage()
        _ordinary[storage._cdata] = StorageWeakRef(storage)


def is_ordinary(parameter: torch.Tensor) -> bool:
    """Say whether it is noted: nothing of its model was partitioned when a graph used it."""
    return has_memory(parameter) and address_of(parameter) in _ordinary
