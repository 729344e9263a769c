"""States in memory that a save in the background has still to write, and the dict that lets nobody change them before.

Called by `checkpoint`. Steps and user code get at a state through `optimizer.state[parameter]`: that is where they are kept
waiting. Where somebody has a reference to a state, or to that dict, nobody can be.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import storage_owners
from zinf_compile.runtime.units.saving import ShardsSave

from .record import take_last_step
from .state_entry import LazyDict, states_of


def _references(holder: Mapping[Any, Any], key: Any) -> int:
    return sys.getrefcount(holder[key])


_ALONE = _references({"": object()}, "")
"""References to a value that only one dict has."""


def unshared(optimizer: Optimizer, parameter: torch.Tensor, names: Collection[str]) -> list[str]:
    """Return the states of a parameter, among these, that only `optimizer.state` has: in a plain dict that only it has."""
    take_last_step(optimizer)  # which has all of them
    states = optimizer.state.get(parameter)
    if type(states) is not dict:
        return []
    del states
    if _references(optimizer.state, parameter) > _ALONE:
        return []
    return [name for name in names if not _is_shared(optimizer.state[parameter], name)]


def _is_shared(states: Mapping[str, torch.Tensor], name: str) -> bool:
    if _references(states, name) > _ALONE:
        return True
    value = states[name]
    return storage_owners(value) > 1 + (value._base is not None)


class StatesWatch:
    """Some states of one parameter, as the owner of pieces of a save."""

    def __init__(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        self._optimizer, self._parameter = optimizer, parameter
        self.names: set[str] = set()
        self._saving: ShardsSave | None = None
        self._watched: WatchedStates | None = None  # while it is in the optimizer

    @property
    def saving(self) -> ShardsSave | None:
        """The save that has still to write some of them, perhaps."""
        return self._saving

    @saving.setter
    def saving(self, saving: ShardsSave | None) -> None:
        self._saving = saving
        if saving is not None:
            watched = WatchedStates(self, self._optimizer.state[self._parameter])
            self._watched = watched
            self._optimizer.state[self._parameter] = watched
        else:
            self._restore()

    def changing(self) -> None:
        """Call before somebody gets one of them: the save writes them first."""
        if self._saving is not None:
            self._saving.before_change(self, 0, sys.maxsize)
            self._restore()

    def _restore(self) -> None:
        watched, self._watched, self._saving = self._watched, None, None
        if watched is not None and states_of(self._optimizer, self._parameter) is watched:
            self._optimizer.state[self._parameter] = watched.states


class WatchedStates(LazyDict):
    """Stands for the dict of a parameter's states, `states`, until somebody asks for one that the save has still to write."""

    def __init__(self, watch: StatesWatch, states: dict[str, Any]) -> None:
        self._watch = watch
        self.states = states

    def __getitem__(self, name: str) -> Any:
        if name in self._watch.names:
            self._watch.changing()
        return self.states[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.states[name] = value

    def __delitem__(self, name: str) -> None:
        del self.states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, name: object) -> bool:
        return name in self.states

    def __repr__(self) -> str:
        return repr(self.copy())
