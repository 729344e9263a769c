"""Steps that repeat the last one: they run on its stand-in, whose shards and states still are those of the parameters."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import no_torch_function
from zinf_compile.runtime.context import Context
from zinf_compile.sharded.parameter import ShardedParameter

from .elementwise_probe import check_elementwise
from .record import record_of, set_last_step, take_last_step
from .running_step import RunningStep, hand_back
from .shard_state import local_part
from .stand_in import refresh_stand_in
from .step_records import settings_of_step


class LastStep:
    """A step that is over and left all states in place, with what the next one has to find in order to be its repetition.

    It keeps the states alive until the next step at most: it goes where `load_state_dict` or a checkpoint puts others in their
    place, or somebody asks who has them. The optimizer keeps it itself, so that both go together.
    Comparisons go over whole columns, so that a model of many small parameters costs no Python code for each.
    """

    def __init__(self, optimizer: Optimizer, running: RunningStep) -> None:
        self._running = running
        self._members = [list(map(id, group["params"])) for group in running.groups]
        self._parameters = [parameter for parameter, _ in running.shards]
        self._units = [parameter._zinf_unit for parameter in self._parameters]
        self._shards = [shard for _, shard in running.shards]
        self._trained = _trained(self._parameters)
        self._places = _places(self._shards)
        known = [(parameter, shard) for parameter, shard in running.shards if id(shard) in running.filled]
        self._numbers = [id(parameter) for parameter, _ in known]
        """Ids of the parameters that have states."""
        self._keys = [shard for _, shard in known]
        """Their shards."""
        self._given = _States([optimizer.state[parameter] for parameter, _ in known])
        self._flat = _States([running.filled[id(shard)][1] for shard in self._keys])
        for shard in self._keys:
            running.optimizer.state[shard] = dict(running.filled[id(shard)][1])
        self.example = self._units[0]
        self._alone = all(unit.shard_group.size == 1 for unit in self._units)
        self.contexts: list[Context] = list(dict.fromkeys(unit.context for unit in self._units))
        """Those of all parameters."""

    def is_repeated(self, optimizer: Optimizer) -> bool:
        """Say whether the optimizer has the same groups of the same parameters, in the same memory, with the same states."""
        groups = optimizer.param_groups
        if len(groups) != len(self._members) or not all(map(operator.is_, groups, self._running.groups)):
            return False
        if any(list(map(id, group["params"])) != members for group, members in zip(groups, self._members, strict=True)):
            return False
        if set(map(type, self._parameters)) != {ShardedParameter}:
            return False
        if not all(map(operator.is_, map(_UNIT, self._parameters), self._units)) or any(map(_BACKING, self._units)):
            return False
        if _places(map(_SHARD, self._units)) != self._places or _trained(self._parameters) != self._trained:
            return False
        states = {id(parameter): state for parameter, state in optimizer.state.items()}
        return len(states) == len(self._numbers) and self._given.are(list(map(states.get, self._numbers)))

    def begin(self, optimizer: Optimizer) -> RunningStep:
        """Give the stand-in the settings and gradients of a step that `is_repeated`; return it."""
        running = self._running
        refresh_stand_in(optimizer, running.optimizer, running.groups)
        copied = any(context.full_copies for context in self.contexts)
        with no_torch_function():
            grads = [parameter.grad for parameter in self._parameters]
        for unit, shard, grad in zip(self._units, self._shards, grads, strict=True):
            if copied or unit.updates is not None or unit.saving is not None:
                unit.wait_updated()  # another optimizer may still update it
                unit.changing()
            shard.grad = local_part(grad, unit)
        running.due = {} if self._alone else settings_of_step(optimizer, by_closure=False)
        running.last = self
        return running

    def end(self, optimizer: Optimizer) -> bool:
        """End a step that `begin` began, if it has left all states in place again; else do nothing and return False."""
        states = self._running.optimizer.state
        if len(states) != len(self._keys) or not self._flat.are(list(map(states.get, self._keys))):
            return False
        for shard in self._shards:
            shard.grad = None
        hand_back(optimizer, self._running)
        return True


class _States:
    """Dicts of states by what is in them: names, objects, and where those are that are tensors."""

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._sizes, self._names = list(map(len, dicts)), list(itertools.chain.from_iterable(dicts))
        self._objects = list(itertools.chain.from_iterable(map(dict.values, dicts)))
        self._tensors = [value for value in self._objects if isinstance(value, torch.Tensor)]
        self._places = _places(self._tensors)

    def are(self, dicts: Sequence[Any]) -> bool:
        """Say whether these dicts have the same in them."""
        return (
            set(map(type, dicts)) <= {dict}
            and list(map(len, dicts)) == self._sizes
            and list(itertools.chain.from_iterable(dicts)) == self._names
            and all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, dicts)), self._objects))
            and _places(self._tensors) == self._places
        )


_UNIT, _BACKING, _SHARD = map(operator.attrgetter, ("_zinf_unit", "backing", "shard"))


def _trained(parameters: Sequence[torch.Tensor]) -> list[tuple[bool, bool]]:
    """Return which of them require grad, and which have a gradient: those that begin to may need states of other kinds."""
    with no_torch_function():
        return [(parameter.requires_grad, parameter.grad is not None) for parameter in parameters]


def _places(tensors: Any) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def begin_repeated(optimizer: Optimizer) -> RunningStep | None:
    """Begin a step without a closure as a repetition of the last one; return None where it is none."""
    record = record_of(optimizer)
    last: LastStep | None = take_last_step(optimizer)  # until its end: a step that raises is not repeated
    if last is None or record.deferred is not None or not last.is_repeated(optimizer):
        return None
    check_elementwise(optimizer, last.example)  # which the settings may decide
    record.step = running = last.begin(optimizer)
    return running


def keep_last_step(optimizer: Optimizer, running: RunningStep) -> None:
    """Keep a step that is over for the next one, if that may be its repetition."""
    record = record_of(optimizer)
    units = [parameter._zinf_unit for parameter, _ in running.shards]
    if (
        not units
        or running.states_changed
        or running.chunked is not None
        or running.split.members()
        or any(unit.backing is not None for unit in units)
        or len(running.groups) != len(optimizer.param_groups)
        or len(units) != sum(len(group["params"]) for group in running.groups)
        or len(running.filled) != len(optimizer.state)
        or not all(parameter in optimizer.state for parameter, shard in running.shards if id(shard) in running.filled)
    ):
        return
    set_last_step(optimizer, LastStep(optimizer, running))
    if not record.forgets_last:
        record.forgets_last = True
        optimizer.register_load_state_dict_post_hook(_forget)


def _forget(optimizer: Optimizer) -> None:
    take_last_step(optimizer)
