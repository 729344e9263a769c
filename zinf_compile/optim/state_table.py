"""Table of the states that the parameters of one optimizer have, and their entries in `optimizer.state`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.sharded.parameter import ShardedParameter

from .chunk_transfers import ChunkTransfers
from .chunks import Kept
from .flat_states import FlatStates
from .pending_states import StatesAside
from .state_entry import StateEntry, in_memory, states_of
from .state_layout import without_note


class StateTable:
    """The states of parameters whose chunks `transfers` moves.

    `optimizer.state` holds the states in memory: small ones, such as step counts, and all of them unless their tier is a drive.
    A parameter with states on a drive has a `StateEntry` there; removing it resets them. `read_copy` reads a state for code that
    may change it, `finish` waits for the last step's updates.
    """

    def __init__(
        self,
        kept: Mapping[ShardedParameter, Kept],
        transfers: ChunkTransfers,
        *,
        by_entry: bool,
        optimizer_name: str,
        read_copy: Callable[[StateTable, StateEntry, str], torch.Tensor],
        finish: Callable[[Optimizer], None],
    ) -> None:
        self.kept = kept
        self.transfers = transfers
        self.by_entry = by_entry
        """Whether `optimizer.state` has a `StateEntry` for each parameter."""
        self.optimizer_name = optimizer_name
        self.entries: dict[ShardedParameter, StateEntry] = {}
        """Entries of parameters that have states; equal to `optimizer.state` after `reconcile`."""
        self.for_state_dict: dict[ShardedParameter, dict[str, Any]] = {}
        """Plain dicts that replace the entries during `state_dict()`."""
        self.aside = StatesAside()
        """States in memory that a deferred step has still to update."""
        self.settled: dict[ShardedParameter, FlatStates] = {}
        """States in memory that are where they belong, as long as they are the same tensors."""
        self._read_copy, self._finish = read_copy, finish

    @property
    def parameters(self) -> Sequence[ShardedParameter]:
        """The parameters, in order."""
        return list(self.kept)

    def new_entry(self, optimizer: Optimizer, parameter: ShardedParameter, memory: Mapping[str, Any]) -> StateEntry:
        """Return an entry for `optimizer.state`, none of whose states is on the drive."""
        return StateEntry(
            optimizer,
            parameter,
            memory,
            names=self.kept[parameter],
            read_copy=partial(self._read_copy, self),
            finish=self._finish,
        )

    def entry_of(self, parameter: ShardedParameter, optimizer: Optimizer) -> StateEntry:
        """Return a parameter's entry; add a new one to `optimizer.state` if there is none."""
        if parameter not in self.entries:
            self.entries[parameter] = self.new_entry(optimizer, parameter, {})
            optimizer.state[parameter] = self.entries[parameter]
        return self.entries[parameter]

    def is_settled(self, optimizer: Optimizer, due: Sequence[ShardedParameter], *, adds: bool) -> bool:
        """Return whether a step of `due` that is under way leaves all states as they are, but for their values.

        Then `reconcile` has nothing to do, and the step adds no state: `adds` says whether it may, where a parameter has none.
        Waits for nothing.
        """
        if not self.by_entry or any(entry.copies for entry in self.entries.values()):
            return False
        for parameter in self.kept:
            given, entry = states_of(optimizer, parameter), self.entries.get(parameter)
            if given is not entry and not (entry is None and type(given) is dict and not given):
                return False
        return all(self._is_complete(parameter, adds=adds) for parameter in due)

    def _is_complete(self, parameter: ShardedParameter, *, adds: bool) -> bool:
        entry = self.entries.get(parameter)
        stored, memory = (set[str](), {}) if entry is None else (entry.stored, without_note(entry.memory))
        return stored == set(self.kept[parameter]) and bool(memory or not adds)

    def present(self, parameter: ShardedParameter, optimizer: Optimizer) -> Set[str]:
        """Return the names of a parameter's states of its size that exist already."""
        if self.by_entry:
            entry = self.entries.get(parameter)
            return entry.stored if entry is not None else frozenset()
        given = self.given(parameter, optimizer) or {}
        return {name for name in self.kept[parameter] if isinstance(given.get(name), torch.Tensor)}

    def given(self, parameter: ShardedParameter, optimizer: Optimizer) -> Any:
        """Return a parameter's states in memory for a step, None without any."""
        return self.aside.get(parameter, optimizer)

    def other_states(self, parameter: ShardedParameter, optimizer: Optimizer, *, but: Set[str]) -> dict[str, Any] | None:
        """Return a parameter's states `but` those of its size, see `present`; None without any states."""
        given = self.entries.get(parameter) if self.by_entry else self.given(parameter, optimizer)
        if given is None:
            return None
        return {name: value for name, value in without_note(in_memory(given)).items() if name not in but}
