"""Entries of `optimizer.state` for parameters with states on a drive: dicts that read a value on access."""

from __future__ import annotations

import collections
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import StepFailedError, StoreError
from zinf_compile.sharded.parameter import ShardedParameter

from .record import record_of
from .state_copy import StateCopy

if TYPE_CHECKING:
    _AnyDict = dict[str, Any]
else:

    class _AnyDict(MutableMapping, dict):
        """A dict whose methods all use those that a subclass defines."""


class LazyDict(_AnyDict):
    """Makes values when they are asked for: a subclass says which, by `__getitem__`, `__iter__` and the like."""

    def copy(self) -> dict[str, Any]:
        """Return a plain dict with all values."""
        return {name: self[name] for name in self}

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # loadable without drive or optimizer; `torch.load(weights_only=True)` accepts this class
        return collections.OrderedDict, (), None, None, iter(self.copy().items())


class StateEntry(LazyDict):
    """The states of one parameter: those in memory, such as step counts, and those on a drive.

    Reading a state on a drive returns a host tensor. While the caller holds it, its changes are written to the drive before the
    next step or `state_dict()`, and each step updates it. Assigning replaces a state; deleting it, or removing the entry from
    `optimizer.state`, resets it. Every access waits for the updates of the last step; reading raises `BudgetError` without memory
    for the value. `names`: the states that the drive stores, in order.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameter: ShardedParameter,
        memory: Mapping[str, Any],
        *,
        names: Iterable[str],
        read_copy: Callable[[StateEntry, str], torch.Tensor],
        finish: Callable[[Optimizer], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._read_copy, self._finish = read_copy, finish
        self.parameter = parameter
        self.memory: dict[str, Any] = dict(memory)
        """States in memory, including assigned ones that are yet to be written to the drive."""
        self.stored: set[str] = set()
        """Names of the states on the drive."""
        self.invalidated = False
        """The entry was removed from `optimizer.state` before a step: its states on the drive are gone."""
        self.copies: dict[str, StateCopy] = {}
        """Host copies of stored states that callers may hold."""

    def __getitem__(self, name: str) -> Any:
        optimizer = self._wait_for_step()
        if name not in self.stored:
            return self.memory[name]
        if optimizer is None:
            raise StepFailedError(f"state {name!r} of {self.parameter._zinf_unit.name} is gone with its optimizer")
        try:
            return self._read_copy(self, name)
        except StoreError as error:
            if (why := record_of(optimizer).incomplete) is not None:
                raise StepFailedError(why) from error
            raise

    def __setitem__(self, name: str, value: Any) -> None:
        self._wait_for_step()
        copy = self.copies.get(name)
        if copy is None or copy.alive() is not value:  # `state[name] += x` assigns the copy, changed in place
            self.forget(name)
            self.memory[name] = value

    def __delitem__(self, name: str) -> None:
        self._wait_for_step()
        if name not in self:
            raise KeyError(name)
        self.forget(name)
        self.memory.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        self._wait_for_step()
        stored = [name for name in self._names if name in self.stored]
        return iter([*self.memory, *stored])

    def __len__(self) -> int:
        self._wait_for_step()
        return len(self.memory) + len(self.stored)

    def __contains__(self, name: object) -> bool:
        self._wait_for_step()
        return name in self.memory or name in self.stored

    def clear(self) -> None:
        """Discard all states, unread."""
        self._wait_for_step()
        self.memory.clear()
        self.stored.clear()
        self.copies.clear()

    def __repr__(self) -> str:
        away = ", ".join(f"{name!r} (on a drive)" for name in sorted(self.stored))
        return f"{type(self).__name__}({self.memory!r}, {away})"

    def invalidate(self) -> None:
        """Make every later access raise."""
        self.invalidated = bool(self.stored)
        self.stored, self.copies = set(), {}

    def forget(self, name: str) -> None:
        """Discard a state on the drive; a copy that the user holds is no longer tied to it."""
        self.stored.discard(name)
        self.copies.pop(name, None)

    def _wait_for_step(self) -> Optimizer | None:
        """Wait for the last step, which may set these states; return the optimizer, None if it was collected."""
        if self.invalidated:
            raise StepFailedError(
                f"the states of {self.parameter._zinf_unit.name} that were here are gone: they were taken out of "
                "optimizer.state, which resets them at the next step or state_dict(). To put them back later, keep a copy, "
                "dict(states)"
            )
        optimizer = self._optimizer()
        if optimizer is not None:
            self._finish(optimizer)
        return optimizer


def states_of(optimizer: Optimizer, parameter: Any) -> Any:
    """Return a parameter's entry in `optimizer.state`, a mapping of any class; None without one."""
    state = optimizer.state
    return state[parameter] if parameter in state else None  # noqa: SIM401, a mapping may lack `get`


def in_memory(states: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the states of a parameter that are in memory, without reading from drives or waiting for a step."""
    memory: Mapping[str, Any] | None = getattr(states, "memory", None) if isinstance(states, LazyDict) else states
    return (states or {}) if memory is None else memory
