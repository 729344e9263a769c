"""The current step of an optimizer: the stand-in on which its own `step` runs, with a shard in place of each parameter."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import no_torch_function
from zinf_compile.sharded.parameter import ShardedParameter, drop_held_values

from .chunked_step import ChunkedStep, explaining_progress, finish_chunks
from .flat_states import FlatStates
from .record import record_of
from .shard_state import kept_state, like_parameter, local_part, shard_state
from .split_states import SplitStep
from .stand_in import STEP_LOCAL, make_stand_in, settings_of
from .state_entry import states_of
from .state_layout import is_noted, noted, without_note
from .step_records import Due
from .timed_update import timed_update


@dataclasses.dataclass(slots=True)
class RunningStep:
    """One step of an optimizer."""

    owner: weakref.ref[Optimizer]
    optimizer: Optimizer
    """The stand-in."""
    groups: list[dict[str, Any]]
    """The owner's group for each of the stand-in's."""
    shards: list[tuple[ShardedParameter, torch.Tensor]]
    """Parameters whose shards are updated at once rather than in chunks."""
    split: SplitStep
    chunked: ChunkedStep | None
    filled: dict[int, tuple[FlatStates, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """States of shards, by the ids of those, as the step found them: if it changes them in place, nothing has to be done."""
    filled_bytes: int = 0
    """Bytes of the states that the step found in memory and may change there."""
    states_changed: bool = False
    """Whether the step has made states, or put others in their place; its end says that."""
    last: Any = None
    """The `LastStep` that this step repeats."""
    due: Due = dataclasses.field(default_factory=dict)
    """Settings and units that the ranks compare after the step."""
    timing: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """Closed when the caller's own step has run."""

    def drop_gradients(self) -> None:
        """Let go of all gradients, which a closure is about to replace: the user's `zero_grad` then frees their memory."""
        for _, shard in self.shards:
            shard.grad = None
        self.split.drop_gradients()

    def begin_timing(self) -> None:
        """The caller's own step is about to run."""
        if self.chunked is not None:
            last = self.chunked.chunks[-1]
            self.timing.enter_context(last.timed(last))
        elif self.shards:
            unit = self.shards[0][0]._zinf_unit
            name = unit.name if len(self.shards) == 1 else f"{unit.name} .. {self.shards[-1][0]._zinf_unit.name}"
            self.timing.enter_context(timed_update(unit.context, name, on_device=True))


def make_running_step(optimizer: Optimizer, in_memory: Sequence[ShardedParameter], chunked: ChunkedStep | None) -> RunningStep:
    """Make the stand-in for the caller's own step."""
    for p in in_memory:
        p._zinf_unit.wait_updated()  # another optimizer may still update it
        p._zinf_unit.changing()
    shards = {p: like_parameter(p._zinf_unit.shard, p._zinf_unit) for p in in_memory}
    members = {id(p): [p] for group in optimizer.param_groups for p in group["params"] if not isinstance(p, ShardedParameter)}
    members.update((id(p), [shard]) for p, shard in shards.items())
    split = SplitStep(optimizer)
    members.update((number, [member]) for number, member in split.members().items())
    if chunked is not None:
        members.update((id(p), [part]) for p, part in chunked.chunks[-1].parts)
    due = {id(p) for source in (chunked.sources if chunked is not None else ()) for p in source.due}

    def has_no_chunk(group: dict[str, Any]) -> bool:
        """Return whether no chunk belongs to the group: as in eager, its counters advance without a gradient."""
        return not any(id(p) in due for p in group["params"])

    stand_in, groups = make_stand_in(optimizer, members, without_members=has_no_chunk)
    running = RunningStep(weakref.ref(optimizer), stand_in, groups, list(shards.items()), split, chunked)
    _fill(optimizer, running)
    return running


def _keep(optimizer: Optimizer, parameter: ShardedParameter, state: dict[str, Any]) -> None:
    """Set the states of a parameter; as in eager, within the existing dict, to which callers may refer."""
    known = states_of(optimizer, parameter)
    if type(known) is dict:
        known.clear()
        known.update(state)
    else:
        optimizer.state[parameter] = state


def _fill(optimizer: Optimizer, running: RunningStep) -> None:
    """Give the stand-in gradients and states."""
    partitioned = {id(p) for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)}
    partitioned |= running.split.members().keys()
    for key, state in optimizer.state.items():
        if id(key) not in partitioned:
            running.optimizer.state[key] = state
    with no_torch_function():
        grads = [parameter.grad for parameter, _ in running.shards]
    for (parameter, shard), grad in zip(running.shards, grads, strict=True):
        shard.grad = local_part(grad, parameter._zinf_unit)
        if parameter in optimizer.state:
            _fill_states(optimizer, running, parameter, shard)
    running.split.fill(optimizer, running.optimizer)
    if running.chunked is not None:
        running.optimizer.state.update(running.chunked.chunks[-1].state)


def _fill_states(optimizer: Optimizer, running: RunningStep, parameter: ShardedParameter, shard: torch.Tensor) -> None:
    """Give a shard its states, by those that it had in the last step where they are in the same memory."""
    states, flat, unit = optimizer.state[parameter], record_of(optimizer).flat, parameter._zinf_unit
    plain = type(states) is dict  # another mapping may make a tensor of its own for each who asks
    known = flat.get(id(parameter)) if plain else None
    filled = None if known is None else known.of(states, others=is_noted(states))
    if filled is None:
        given = without_note(states)
        filled = {k: shard_state(v, unit, k, optimizer) for k, v in given.items()}
        known = FlatStates(given, filled) if plain and _in_place(given, filled) else None
    if known is not None:
        flat[id(parameter)] = known
        running.filled_bytes += known.bytes
        if unit.shard_group.size == 1 or is_noted(states):
            running.filled[id(shard)] = known, dict(filled)
    running.optimizer.state[shard] = filled


def _in_place(given: Mapping[str, Any], filled: Mapping[str, Any]) -> bool:
    """Say whether the states of a shard are the memory of those that a parameter has, in the form in which they are kept."""
    return all(
        filled[name] is value or (type(value) is torch.Tensor and value.data_ptr() == filled[name].data_ptr())
        for name, value in given.items()
    )


def end_step(optimizer: Optimizer, running: RunningStep) -> None:
    """Copy states, settings and attributes from the stand-in to the optimizer, after its step."""
    stand_in = running.optimizer
    for parameter, shard in running.shards:
        state = stand_in.state.pop(shard, None)
        known, filled = running.filled.get(id(shard), (None, {}))
        if state is not None and not (known is not None and known.hold(filled, state)):
            unit = parameter._zinf_unit
            _keep(optimizer, parameter, noted({k: kept_state(v, unit) for k, v in state.items()}, unit))
            running.states_changed = True
        shard.grad = None
    running.split.finish(optimizer, stand_in)
    if running.chunked is not None:
        with explaining_progress(optimizer):
            finish_chunks(optimizer, running.chunked, stand_in)
    for key, value in stand_in.state.items():
        optimizer.state[key] = value
    hand_back(optimizer, running)


def hand_back(optimizer: Optimizer, running: RunningStep) -> None:
    """Note that the parameters have changed, and copy settings and attributes from the stand-in to the optimizer."""
    stand_in = running.optimizer
    torch.autograd.graph.increment_version(parameter for parameter, _ in running.shards)
    drop_held_values(stepped=True)
    for mine, theirs in zip(running.groups, stand_in.param_groups, strict=True):
        mine.update(settings_of(theirs))
    for name, value in vars(stand_in).items():
        if name not in STEP_LOCAL:
            vars(optimizer)[name] = value
