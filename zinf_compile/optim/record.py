"""The package's state of each optimizer, from its first step to its collection: one `OptimizerRecord`.

The modules of this folder read and write it; it imports none of those, so some fields are typed at their use.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

from torch.optim import Optimizer

from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.parameter import ShardedParameter

from .flat_states import FlatStates


class State(enum.Enum):
    """Progress of an optimizer's step."""

    WHOLE = enum.auto()
    """Between two steps: parameters and states belong to the same step."""
    UPDATING = enum.auto()
    """Some chunks of a step are updated; an interrupt leaves this state."""
    DEFERRED = enum.auto()
    """The rest of a step runs during the next forward."""
    INCOMPLETE = enum.auto()
    """A step, or loading states, failed partway: only loading a checkpoint recovers."""
    STAND_IN = enum.auto()
    """A stand-in for another optimizer, within a step of that one."""


class StatesSave(Protocol):
    """A save that goes on in the background."""

    def tell(self) -> None:
        """Raise its error on all ranks, once, as soon as one rank has one. A collective operation, at the start of a step."""


@dataclasses.dataclass(eq=False, slots=True)
class OptimizerRecord:
    """State of one optimizer."""

    state: State = State.WHOLE
    incomplete: str | None = None
    """Error message for a step that fails now or has failed; None in state `WHOLE`."""
    step: Any = None
    """The current `RunningStep`."""
    forgets_last: bool = False
    """`load_state_dict` forgets the `LastStep`."""
    deferred: Any = None
    """The last `DeferredStep`, until it was waited for."""
    saving: StatesSave | None = None
    """A save in the background, until all ranks know how it ended."""
    offloaded: list[Any] | None = None
    """The `OffloadedStates` of parameters that are updated in chunks; None before the first."""
    steps_done: int | None = None
    """Steps since construction or loading; None before the first step that ranks compare."""
    verdicts: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    """Results of the element-wise probe, by the settings that may decide them."""
    state_bytes: dict[Ledger, int] | None = None
    """Bytes of its states in memory, as added to the ledgers."""
    flat: dict[int, FlatStates] = dataclasses.field(default_factory=dict)
    """States of parameters, by their ids, as the shards that the last step updated."""
    filled_bytes: int | None = None
    """`RunningStep.filled_bytes` of the step whose states were added to the ledgers; None before the first."""
    counted: set[int] = dataclasses.field(default_factory=set)
    """Parameters, by id, whose states were counted against the caps."""
    keeps_precision: bool = False
    """Loading keeps states in the types in which they were saved."""
    loaded_master: bool = False
    """A master copy was loaded for a parameter that is not partitioned, or not yet."""
    memory_left: frozenset[int] = frozenset()
    """Storages that partitioned parameters have left, as its last check of what it updates has found them."""
    loading: Mapping[Any, Mapping[str, Any]] | None = None
    """States that are being loaded, as they were saved."""
    checkpoint: str | None = None
    """The folder of its last checkpoint, which this process has saved or loaded."""
    rehearsed: bool = False
    """What has to happen before its first update is done, see `before_updates`."""
    reported: bool = False
    """The log has described its first step."""
    warned: set[str] = dataclasses.field(default_factory=set)
    """Warnings given once."""

    @property
    def way_back(self) -> str:
        """What to add to an error that asks for a checkpoint: the last one, where there is one."""
        return "" if self.checkpoint is None else f": zinf_compile.load({self.checkpoint!r}, model, optimizer)"

    def mark_incomplete(self, name: str, chunks: int) -> None:
        """Mark the step as partly done until it ends. `name`: the optimizer's class."""
        if self.state is not State.DEFERRED:
            self.state = State.UPDATING
        self.incomplete = (
            f"a step of {name} ended in the middle, at chunk {chunks}: some parameters and states are updated, "
            "others are not. Load a checkpoint of model and optimizer, both from before this step, and go on from there"
            f"{self.way_back}"
        )

    def mark_deferred(self) -> None:
        """Mark the rest of the step as deferred."""
        assert self.incomplete is not None, "a part of it is done"
        self.state = State.DEFERRED

    def mark_ended(self, why: str | None = None) -> None:
        """Mark a step, or loading, as failed partway; `why` is the message, unless there is one."""
        self.state = State.INCOMPLETE
        self.incomplete = why or self.incomplete

    def mark_whole(self) -> None:
        """Mark a step as complete, or states as loaded."""
        self.state, self.incomplete = State.WHOLE, None


_records: weakref.WeakKeyDictionary[Optimizer, OptimizerRecord] = process_wide(weakref.WeakKeyDictionary())


def record_of(optimizer: Optimizer) -> OptimizerRecord:
    """Return the record of an optimizer, created at the first call."""
    found = _records.get(optimizer)
    return _records.setdefault(optimizer, OptimizerRecord()) if found is None else found


LAST = "_zinf_last_step"
"""Attribute of an optimizer with the `LastStep`, which the next step may repeat. Here it would keep the optimizer alive."""


def set_last_step(optimizer: Optimizer, last: Any) -> None:
    """Keep a step for the next one."""
    vars(optimizer)[LAST] = last


def take_last_step(optimizer: Optimizer) -> Any:
    """Return the step that was kept, None without one; it is kept no longer."""
    return vars(optimizer).pop(LAST, None)


def all_records() -> list[tuple[Optimizer, OptimizerRecord]]:
    """Return the live optimizers with their records; other threads may add records meanwhile."""
    living = [optimizer for reference in _records.keyrefs() if (optimizer := reference()) is not None]
    return [(optimizer, record_of(optimizer)) for optimizer in living]


def spoil_updated(optimizer: Optimizer) -> None:
    """Make reads of the parameters of an incomplete step raise until they are loaded."""
    why = record_of(optimizer).incomplete
    assert why is not None, "the step failed partway"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, ShardedParameter) and parameter.grad is not None:
                parameter._zinf_unit.spoil(why)
