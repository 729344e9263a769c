"""What this package knows of an optimizer, from its first step for as long as it lives: one record for each.

The modules of this folder read and write the record; it imports none of them, so some fields are typed where they are used.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

from torch.optim import Optimizer

from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.parameter import ShardedParameter


class State(enum.Enum):
    """Where an optimizer is in its steps."""

    WHOLE = enum.auto()
    """Between two steps: parameters and states are of the same step."""
    UPDATING = enum.auto()
    """Some chunks of a step are updated, or an interrupt has ended it there."""
    DEFERRED = enum.auto()
    """The rest of a step is left to the next forward."""
    INCOMPLETE = enum.auto()
    """A step, or loading states, has ended in its middle: only loading helps."""
    STANDS_IN = enum.auto()
    """It stands in for another one in a step of that one."""


@dataclasses.dataclass(eq=False, slots=True)
class OptimizerRecord:
    """What is known of one optimizer."""

    state: State = State.WHOLE
    incomplete: str | None = None
    """What to say of parameters and states where the step under way ends now, or has ended; None in state `WHOLE`."""
    step: Any = None
    """The `RunningStep` that has begun."""
    deferred: Any = None
    """The last step of which a part was left to the next forward, a `DeferredStep`, until somebody has waited for it."""
    offloaded: list[Any] | None = None
    """The `OffloadedStates` of the parameters that are updated in chunks; None before there were any."""
    steps_done: int | None = None
    """Since the optimizer was made or its states were loaded; None before the first one that ranks compare."""
    verdicts: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    """Whether it updates element by element, by the settings that may decide it."""
    state_bytes: dict[Ledger, int] | None = None
    """What its states in memory take, as the ledgers were told."""
    counted: set[int] = dataclasses.field(default_factory=set)
    """Parameters, by identity, whose states were counted against the caps."""
    keeps_precision: bool = False
    """Loading keeps states in the types in which they were saved."""
    loading: Mapping[Any, Mapping[str, Any]] | None = None
    """States that are being loaded, as they were saved."""
    reported: bool = False
    """The log has described its first step."""
    warned: set[str] = dataclasses.field(default_factory=set)
    """What its user was warned of, once."""

    def mark_incomplete(self, name: str, chunks: int) -> None:
        """Note that from now on, until the step is over, some of it is done and some is not. `name` is the optimizer's class."""
        if self.state is not State.DEFERRED:
            self.state = State.UPDATING
        self.incomplete = (
            f"a step of {name} ended in the middle, at chunk {chunks}: some parameters and states are updated, "
            "others are not. Load a checkpoint of model and optimizer, both from before this step, and go on from there"
        )

    def mark_deferred(self) -> None:
        """Note that the rest of the step is done beside the next forward."""
        assert self.incomplete is not None, "a part of it is done"
        self.state = State.DEFERRED

    def mark_ended(self, why: str | None = None) -> None:
        """Note that a step, or loading, has ended in its middle, and what to say of it, unless that is known."""
        self.state = State.INCOMPLETE
        self.incomplete = why or self.incomplete

    def mark_whole(self) -> None:
        """Note that a step is over, or states are loaded."""
        self.state, self.incomplete = State.WHOLE, None


_records: weakref.WeakKeyDictionary[Optimizer, OptimizerRecord] = process_wide(weakref.WeakKeyDictionary())


def record_of(optimizer: Optimizer) -> OptimizerRecord:
    """Return the record of an optimizer, made at the first call."""
    found = _records.get(optimizer)
    return _records.setdefault(optimizer, OptimizerRecord()) if found is None else found


def all_records() -> list[tuple[Optimizer, OptimizerRecord]]:
    """Return the optimizers that live, with their records; other threads may make records meanwhile."""
    living = [optimizer for reference in _records.keyrefs() if (optimizer := reference()) is not None]
    return [(optimizer, record_of(optimizer)) for optimizer in living]


def spoil_updated(optimizer: Optimizer) -> None:
    """Let nobody compute with what an incomplete step was to update, until that is loaded."""
    why = record_of(optimizer).incomplete
    assert why is not None, "it has ended in its middle"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, ShardedParameter) and parameter.grad is not None:
                parameter._zinf_unit.spoil(why)
