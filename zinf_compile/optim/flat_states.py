"""The states of a parameter as the flat shards that an optimizer updates: which of them are the memory of the states."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch


class FlatStates:
    """How shards are made of a parameter's states, as long as these are the same tensors. It keeps no tensor, nor its memory."""

    __slots__ = ("_known", "bytes")

    def __init__(self, states: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
        tensors = {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
        self.bytes = sum(value.nbytes for value in tensors.values())
        """Those of the states."""
        self._known = {
            name: (weakref.ref(value), value.data_ptr(), None if flat[name] is value else flat[name].numel())
            for name, value in tensors.items()
        }

    def are(self, states: Any) -> bool:
        """Say whether these are the states, in a plain dict."""
        if type(states) is not dict:
            return False
        for name, (of, place, _) in self._known.items():
            state = of()
            if state is None or state.data_ptr() != place or state is not states.get(name):
                return False
        return True

    def of(self, states: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the shards of `states`; None if one of those is not a tensor that it was, in the same memory."""
        shards = {}
        for name, value in states.items():
            of, place, numel = self._known.get(name, (_nothing, 0, None))
            state = of()
            if state is None or state is not value or state.data_ptr() != place:
                return None
            shards[name] = state if numel is None else state.as_strided((numel,), (1,))
        return shards


def _nothing() -> None:
    return None
