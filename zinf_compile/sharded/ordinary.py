"""Models that are compiled, and whose parameters stay ordinary ones because nothing would move: one parameter of each graph."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zinf_compile.runtime.system.process_wide import process_wide

_ordinary: dict[int, StorageWeakRef] = process_wide({})
"""By the address of a parameter's storage, which no other gets while it is referred to. The parameter itself is not referred to:
PyTorch swaps no tensors that have weak references, as a change of a model's type may."""

_LOOKED_FOR = 64
"""Storages that are noted from one search for those that are gone to the next."""


def has_memory(parameter: torch.Tensor) -> bool:
    """Say whether it may be noted: sparse ones have no storage."""
    return parameter.layout == torch.strided


def note_ordinary(parameter: torch.Tensor) -> None:
    """Note that a compiled graph has used this one. Called once for a call, with one of the parameters that it uses."""
    storage = parameter.untyped_storage()
    if storage._cdata not in _ordinary:
        if len(_ordinary) % _LOOKED_FOR == _LOOKED_FOR - 1:
            for address in [address for address, reference in _ordinary.items() if reference.expired()]:
                del _ordinary[address]
        _ordinary[storage._cdata] = StorageWeakRef(storage)


def is_ordinary(parameter: torch.Tensor) -> bool:
    """Say whether it is noted: where one parameter of a model is, nothing of the model was partitioned when it was used."""
    return has_memory(parameter) and parameter.untyped_storage()._cdata in _ordinary
