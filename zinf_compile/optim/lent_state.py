"""A state that was read from a drive for code that may change it: known for as long as anybody can see its memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.units.unit import Unit

from .shard_state import kept_state, like_parameter


class LentState:
    """One state of one parameter, in host memory of its own.

    Its memory is handed out as that of a numpy array, which PyTorch keeps alive for as long as a tensor over it, or any alias
    of one, is.
    """

    def __init__(self, unit: Unit, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            self._bytes = torch.empty(format_of(dtype).bytes(unit.shard_numel), dtype=torch.uint8)
        self.flat = self._bytes.view(dtype)
        """Its values, for this package."""
        self._unit = unit
        self._array: weakref.ref[Any] | None = None
        self._tensor: weakref.ref[torch.Tensor] | None = None
        unit.context.memory.host_ledger.track("states", self.flat)

    @property
    def held(self) -> bool:
        """Whether anybody can still see the memory."""
        return self._array is not None and self._array() is not None

    def alive(self) -> torch.Tensor | None:
        """Return the tensor that was handed out, if it is still there."""
        return None if self._tensor is None else self._tensor()

    def tensor(self) -> torch.Tensor:
        """Return the values as the caller's tensor, of the shape that `state_dict()` gives; the same one while it lives."""
        found = self.alive()
        if found is None:
            array = None if self._array is None else self._array()
            if array is None:
                array = self._bytes.numpy()
                self._array = weakref.ref(array)
            with torch.inference_mode(False):
                flat = torch.from_numpy(array).view(self.flat.dtype)
                found = like_parameter(kept_state(flat, self._unit), self._unit)
            self._tensor = weakref.ref(found)
        return found

    def same_bytes(self, start: int, end: int, other: torch.Tensor) -> bool:
        """Say whether elements `start` to `end` have the bits of `other`."""
        return torch.equal(self.flat[start:end].view(torch.uint8), other.contiguous().cpu().view(torch.uint8))
