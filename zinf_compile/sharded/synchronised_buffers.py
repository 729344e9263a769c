"""Buffers that a graph's first call leaves as they are on each rank: those that it has synchronised before, and those that a
checkpoint has given each rank."""

from __future__ import annotations

import weakref

import torch

from zinf_compile.runtime.system.process_wide import process_wide

_synchronised: dict[int, weakref.ref[torch.Tensor]] = process_wide({})


def is_synchronised(buffer: torch.Tensor) -> bool:
    """Say whether a buffer is one of them."""
    known = _synchronised.get(id(buffer))
    return known is not None and known() is buffer


def note_synchronised(buffer: torch.Tensor) -> None:
    """Let it be one of them; on all ranks, or their graphs' first calls differ."""
    key = id(buffer)
    _synchronised[key] = weakref.ref(buffer, lambda _: _synchronised.pop(key, None))
