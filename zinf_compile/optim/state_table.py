"""Which states the parameters of one optimizer have, and what `optimizer.state` has of them where they live on drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.sharded.parameter import ShardedParameter

from .chunk_transfers import ChunkTransfers
from .chunks import Kept
from .state_entry import StateEntry, in_memory, states_of
from .state_layout import without_note


class StateTable:
    """The states of parameters whose chunks `transfers` moves.

    `optimizer.state` keeps what is in memory: what is not of a parameter's size, such as step counts, and where the tier of
    states isn't a drive all of them. For what is on drives a parameter has a `StateEntry` there; it has states for as long as
    that is in `optimizer.state`. `lend` reads a state for code that may change it, `finish` waits for the last step's updates.
    """

    def __init__(
        self,
        kept: Mapping[ShardedParameter, Kept],
        transfers: ChunkTransfers,
        *,
        by_entry: bool,
        optimizer_name: str,
        lend: Callable[[StateTable, StateEntry, str], torch.Tensor],
        finish: Callable[[Optimizer], None],
    ) -> None:
        self.kept = kept
        self.transfers = transfers
        self.by_entry = by_entry
        """Whether `optimizer.state` has a `StateEntry` for each parameter."""
        self.optimizer_name = optimizer_name
        self.entries: dict[ShardedParameter, StateEntry] = {}
        """Of the parameters that have states; as in `optimizer.state` since `absorb` compared them."""
        self.brought: dict[ShardedParameter, dict[str, Any]] = {}
        """What stands there instead while `state_dict` is taken."""
        self._lend, self._finish = lend, finish

    @property
    def parameters(self) -> Sequence[ShardedParameter]:
        """Those whose states these are."""
        return list(self.kept)

    def new_entry(self, optimizer: Optimizer, parameter: ShardedParameter, memory: Mapping[str, Any]) -> StateEntry:
        """Return an entry for `optimizer.state`, none of whose states is on the drive."""
        return StateEntry(
            optimizer, parameter, memory, names=self.kept[parameter], lend=partial(self._lend, self), finish=self._finish
        )

    def entry_of(self, parameter: ShardedParameter, optimizer: Optimizer) -> StateEntry:
        """Return a parameter's entry; where it has none, a new one, in `optimizer.state`, too."""
        if parameter not in self.entries:
            self.entries[parameter] = self.new_entry(optimizer, parameter, {})
            optimizer.state[parameter] = self.entries[parameter]
        return self.entries[parameter]

    def present(self, parameter: ShardedParameter, optimizer: Optimizer) -> Set[str]:
        """Return the names of a parameter's states that the next update goes on from."""
        if self.by_entry:
            entry = self.entries.get(parameter)
            return entry.stored if entry is not None else frozenset()
        given = states_of(optimizer, parameter) or {}
        return {name for name in self.kept[parameter] if isinstance(given.get(name), torch.Tensor)}

    def other_states(self, parameter: ShardedParameter, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return those of a parameter's states that aren't brought; None where it has no states at all."""
        given = self.entries.get(parameter) if self.by_entry else states_of(optimizer, parameter)
        if given is None:
            return None
        present = self.present(parameter, optimizer)
        return {name: value for name, value in without_note(in_memory(given)).items() if name not in present}
