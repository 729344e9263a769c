"""Host copy of a state on a drive, given to user code that may change it; tracked until no alias of its memory is left.

Made by `state_exchange`; changes are written back by `load_states`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.units.unit import Unit

from .shard_state import kept_state, like_parameter


class StateCopy:
    """Host copy of one state of one parameter.

    The tensor given to the user is built over a numpy array, which PyTorch keeps alive while any alias of the tensor lives: a
    weak reference to the array tells when the copy can no longer change.
    """

    def __init__(self, unit: Unit, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            self._bytes = torch.empty(format_of(dtype).bytes(unit.shard_numel), dtype=torch.uint8)
        self.flat = self._bytes.view(dtype)
        """The values, flat, for use within the package."""
        self._unit = unit
        self._array: weakref.ref[Any] | None = None
        self._tensor: weakref.ref[torch.Tensor] | None = None
        unit.context.memory.host_ledger.track("states", self.flat)

    @property
    def held(self) -> bool:
        """Whether an alias of the memory is alive outside the package."""
        return self._array is not None and self._array() is not None

    def alive(self) -> torch.Tensor | None:
        """Return the user's tensor, None if it was collected."""
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
        """Return whether elements `start` to `end` have the bits of `other`."""
        return torch.equal(self.flat[start:end].view(torch.uint8), other.contiguous().cpu().view(torch.uint8))
