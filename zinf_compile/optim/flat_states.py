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
        self._known = tuple(
            (name, weakref.ref(value), value.data_ptr(), None if flat[name] is value else (flat[name].numel(),))
            for name, value in tensors.items()
        )

    def are(self, states: Any) -> bool:
        """Say whether these are the states, in a plain dict."""
        return type(states) is dict and all(
            (state := of()) is not None and name in states and states[name] is state and state.data_ptr() == place
            for name, of, place, _ in self._known
        )

    def of(self, states: Mapping[str, Any], others: int = 0) -> dict[str, Any] | None:
        """Return the shards of `states`; None if one of those is not a tensor that it was, in the same memory.

        `others`: the number of entries of `states` that are none.
        """
        shards = {}
        for name, of, place, size in self._known:
            state = of()
            if state is None or name not in states or states[name] is not state or state.data_ptr() != place:
                return None
            shards[name] = state if size is None else state.as_strided(size, _FLAT)
        return shards if len(shards) + others == len(states) else None

    def hold(self, shards: Mapping[str, Any], updated: Mapping[str, Any]) -> bool:
        """Say whether an update of the states that `shards` were made of has left the same objects, in the same memory."""
        if len(shards) != len(updated):
            return False
        for name, value in shards.items():
            if updated.get(name, self) is not value:
                return False
        return all(shards[name].data_ptr() == place for name, _, place, _ in self._known)


_FLAT = (1,)
