"""What `optimizer.state` has of a parameter whose states live on a drive: a dict that reads a value when it is asked for it."""

from __future__ import annotations

import collections
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import StepFailedError
from zinf_compile.sharded.parameter import ShardedParameter

from .lent_state import LentState

if TYPE_CHECKING:
    _AnyDict = dict[str, Any]
else:

    class _AnyDict(MutableMapping, dict):
        """A dict whose methods all go through those that a subclass defines."""


class StateEntry(_AnyDict):
    """The states of one parameter: those in memory, such as step counts, and those on a drive.

    Reading a state on a drive gives a tensor on the host: a copy while the caller holds it, of which every change reaches the
    drive before the next step or `state_dict()`, and every step the tensor. Assigning replaces a state; deleting one, or taking
    the entry out of `optimizer.state`, resets it. Whatever is asked waits for the updates of the last step; raises
    `BudgetError` where there is no memory for a value. `names` are those of the states that the drive has room for, in order.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameter: ShardedParameter,
        memory: Mapping[str, Any],
        *,
        names: Iterable[str],
        lend: Callable[[StateEntry, str], torch.Tensor],
        finish: Callable[[Optimizer], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._lend, self._finish = lend, finish
        self.parameter = parameter
        self.memory: dict[str, Any] = dict(memory)
        """States that are in memory, those among them that were assigned and are to go to the drive."""
        self.stored: set[str] = set()
        """Names of those on the drive."""
        self.lost = False
        """A step was taken since it was taken out of `optimizer.state`: what it had on the drive is gone."""
        self.lent: dict[str, LentState] = {}
        """Copies of these that callers may still hold."""

    def __getitem__(self, name: str) -> Any:
        optimizer = self._settled()
        if name in self.stored and optimizer is None:
            raise StepFailedError(f"state {name!r} of {self.parameter._zinf_unit.name} is gone with its optimizer")
        if name in self.stored:
            return self._lend(self, name)
        return self.memory[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._settled()
        lent = self.lent.get(name)
        if lent is None or lent.alive() is not value:  # `state[name] += x` assigns what it has changed in place
            self.forget(name)
            self.memory[name] = value

    def __delitem__(self, name: str) -> None:
        self._settled()
        if name not in self:
            raise KeyError(name)
        self.forget(name)
        self.memory.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        self._settled()
        stored = [name for name in self._names if name in self.stored]
        return iter([*self.memory, *stored])

    def __len__(self) -> int:
        self._settled()
        return len(self.memory) + len(self.stored)

    def __contains__(self, name: object) -> bool:
        self._settled()
        return name in self.memory or name in self.stored

    def clear(self) -> None:
        """Forget all states, unread."""
        self._settled()
        self.memory.clear()
        self.stored.clear()
        self.lent.clear()

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
        # whoever loads it has neither drive nor optimizer; `torch.load(weights_only=True)` takes this class
        return collections.OrderedDict, (), None, None, iter(self.copy().items())

    def __repr__(self) -> str:
        away = ", ".join(f"{name!r} (on a drive)" for name in sorted(self.stored))
        return f"{type(self).__name__}({self.memory!r}, {away})"

    def lose(self) -> None:
        """Count no more, for those who still hold it."""
        self.lost = bool(self.stored)
        self.stored, self.lent = set(), {}

    def forget(self, name: str) -> None:
        """Let a state on the drive count no more; a copy that somebody holds is their own from now on."""
        self.stored.discard(name)
        self.lent.pop(name, None)

    def _settled(self) -> Optimizer | None:
        """Wait for the last step's updates, which may set what is here."""
        if self.lost:
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
    """Return what `optimizer.state`, a mapping of whatever class, has of a parameter; None where it has nothing."""
    state = optimizer.state
    return state[parameter] if parameter in state else None  # noqa: SIM401, a mapping may lack `get`


def in_memory(states: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the states of a parameter that are in memory, without reading others."""
    return states.memory if isinstance(states, StateEntry) else (states or {})
