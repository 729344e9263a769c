"""States of PyTorch's generator on the CPU, MT19937: the one after any number of draws, found without drawing."""

from __future__ import annotations

import torch

from zinf_compile._csrc import Mt19937

_WORDS, _STATE_BYTES = 624, 5056
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS)
"""Offsets in PyTorch's form of a generator's state: see CPUGeneratorImplStateLegacy in its sources."""


def is_state(state: torch.Tensor) -> bool:
    """Return whether a generator's state has the form known here."""
    return state.dtype == torch.uint8 and state.shape == (_STATE_BYTES,)


class Stream:
    """The numbers that a generator draws after a state. It is a value: `ahead` returns another."""

    def __init__(self, state: torch.Tensor) -> None:
        """Begin where `generator.get_state()` says. Raises `ValueError` for a state of another form."""
        if not is_state(state):
            raise ValueError(f"the state of a CPU generator has {_STATE_BYTES} bytes, not {list(state.shape)} {state.dtype}")
        self._rest = state
        words = state[_STATE].clone()
        left = int(state[_LEFT].view(torch.int32))
        self._native = Mt19937(words.data_ptr(), _WORDS + 1 - left)

    def state(self) -> torch.Tensor:
        """Return what `generator.set_state` takes to go on here."""
        state = self._rest.clone()
        self._native.write_state(state[_STATE].data_ptr())
        state[_LEFT].view(torch.int32).fill_(_WORDS + 1 - self._native.used)
        state[_NEXT].view(torch.int64).fill_(self._native.used)
        return state

    def ahead(self, count: int) -> Stream:
        """Return the stream after as many of its numbers."""
        other = Stream.__new__(Stream)
        other._rest, other._native = self._rest, self._native.copy()
        other._native.skip(count)
        return other

    def generator(self) -> torch.Generator:
        """Return a generator that draws the stream's numbers."""
        generator = torch.Generator()
        generator.set_state(self.state())
        return generator
