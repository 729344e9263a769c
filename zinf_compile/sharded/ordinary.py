"""Models that are compiled, and whose parameters stay ordinary ones because nothing would move: one parameter of each graph."""

from __future__ import annotations

import weakref

import torch

from zinf_compile.runtime.system.process_wide import process_wide

_ordinary: dict[int, weakref.ref[torch.Tensor]] = process_wide({})
"""By identity: tensors compare by their values."""


def note_ordinary(parameter: torch.Tensor) -> None:
    """Note that a compiled graph has used this one. Called once for a call, with one of the parameters that it uses."""
    key = id(parameter)
    if key not in _ordinary:
        _ordinary[key] = weakref.ref(parameter, lambda _: _ordinary.pop(key, None))


def is_ordinary(parameter: torch.Tensor) -> bool:
    """Say whether it is noted: where one parameter of a model is, nothing of the model was partitioned when it was used."""
    reference = _ordinary.get(id(parameter))
    return reference is not None and reference() is parameter
