"""States in memory while a deferred step has still to update them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from zinf_compile.sharded.parameter import ShardedParameter

from .state_entry import LazyDict, states_of


class PendingStates(LazyDict):
    """Stands in `optimizer.state` for the dict of a parameter's states in memory until the step that updates them was waited for.

    Whoever asks for anything waits. `memory` is the dict itself.
    """

    def __init__(self, optimizer: Optimizer, memory: dict[str, Any], finish: Callable[[Optimizer], None]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._finish = finish
        self.memory = memory

    def __getitem__(self, name: str) -> Any:
        return self._now()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._now()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __contains__(self, name: object) -> bool:
        return name in self._now()

    def __repr__(self) -> str:
        return repr(self._now())

    def _now(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        if optimizer is not None:
            self._finish(optimizer)
        return self.memory


class StatesAside:
    """The dicts of a step's states in memory that a `PendingStates` stands for."""

    def __init__(self) -> None:
        self._aside: dict[ShardedParameter, PendingStates] = {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._aside

    def take(self, optimizer: Optimizer, parameters: Sequence[ShardedParameter], finish: Callable[[Optimizer], None]) -> None:
        """Let `optimizer.state` have a `PendingStates` for each of them that has states."""
        for parameter in parameters:
            states = states_of(optimizer, parameter)
            if type(states) is dict:
                optimizer.state[parameter] = self._aside[parameter] = PendingStates(optimizer, states, finish)

    def get(self, parameter: ShardedParameter, optimizer: Optimizer) -> Any:
        """Return a parameter's states for the step itself, as `states_of` does."""
        pending = self._aside.get(parameter)
        return states_of(optimizer, parameter) if pending is None else pending.memory

    def set(self, parameter: ShardedParameter, states: dict[str, Any]) -> None:
        """Replace a parameter's states by those after the step."""
        self._aside[parameter].memory = states

    def put_back(self, optimizer: Optimizer) -> None:
        """After the step: let `optimizer.state` have the dicts again, unless others are there by now, or none."""
        while self._aside:
            parameter, pending = self._aside.popitem()
            if states_of(optimizer, parameter) is pending:
                optimizer.state[parameter] = pending.memory
