"""Trial of an optimizer on a private tensor: its states, and comparisons of a piece alone with the whole.

Called by `elementwise_probe`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import tree_leaves

from .eager_models import leave_unchecked

_HIDDEN = (
    "param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "step", "grad_scale", "found_inf",
)  # fmt: skip


class TensorSubclassStateError(Exception):
    """A state is an instance of a tensor subclass."""


class _Watched(dict[str, Any]):
    """States of one parameter; raises `TensorSubclassStateError` as soon as one is assigned, before it is used."""

    def __setitem__(self, name: str, value: Any) -> None:
        check_kind(name, value)
        super().__setitem__(name, value)


def check_kind(name: str, value: Any) -> None:
    """Raise `TensorSubclassStateError` for a state that is a tensor subclass: its values aren't one number for each element."""
    if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TensorSubclassStateError(
            f"its state {name!r} is a {type(value).__name__}, a tensor class of its own, which can't be cut into shards"
        )


class Trial:
    """The optimizer's class with the settings of one group, on one private tensor."""

    def __init__(self, optimizer: Optimizer, settings: Mapping[str, Any], value: torch.Tensor) -> None:
        self._parameter = torch.nn.Parameter(value.clone())
        trial: Optimizer = object.__new__(type(optimizer))
        vars(trial).update({k: v for k, v in vars(optimizer).items() if k not in _HIDDEN})
        trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = collections.OrderedDict(), collections.OrderedDict()
        trial.param_groups = [{**copy.deepcopy(_plain(settings)), "params": [self._parameter]}]
        trial.state = collections.defaultdict(_Watched)
        self._trial = trial
        leave_unchecked(trial)
        self._take_constructors_states(optimizer)
        self._before: dict[tuple[str, str], float] = {}

    def step(self, grad: torch.Tensor, ahead: int = 0) -> None:
        """Take one step; with `ahead`, first add it to all step counters: numbers that the last step raised by one."""
        if ahead:
            self._advance_counters(ahead)
        self._before = self.numbers()
        self._parameter.grad = grad.clone()
        self._trial.step()

    @property
    def value(self) -> torch.Tensor:
        """The parameter's values, flat."""
        return self._parameter.detach().reshape(-1)

    @property
    def states(self) -> dict[str, Any]:
        """The optimizer's states of the tensor."""
        return self._trial.state.get(self._parameter, {})

    def numbers(self) -> dict[tuple[str, str], float]:
        """Return the scalars among states, settings and attributes, by (where, name)."""
        return {(where, n): float(v) for where, names in self._mappings() for n, v in names.items() if _is_number(v)}

    def _advance_counters(self, ahead: int) -> None:
        for where, names in self._mappings():
            for name, value in list(names.items()):
                if _is_number(value) and float(value) - self._before.get((where, name), float("nan")) == 1:
                    if isinstance(value, torch.Tensor):
                        value.add_(ahead)
                    else:
                        names[name] = value + ahead

    def _mappings(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "state", self.states
        yield "setting", self._trial.param_groups[0]
        yield "attribute", vars(self._trial)

    def _take_constructors_states(self, optimizer: Optimizer) -> None:
        """Copy the states that classes such as Adagrad create in their constructor."""
        known = inspect.signature(type(optimizer).__init__).parameters
        with contextlib.suppress(Exception):  # a constructor with required arguments: most create no state
            fresh = type(optimizer)([self._parameter], **{k: v for k, v in optimizer.defaults.items() if k in known})
            if fresh.state:
                self._trial.state = fresh.state
        for name, value in self.states.items():
            check_kind(name, value)


def large_states(states: Mapping[str, Any], value: torch.Tensor) -> dict[str, torch.dtype]:
    """Return names and data types of the states with one value per element."""
    return {k: v.dtype for k, v in states.items() if isinstance(v, torch.Tensor) and v.numel() == value.numel()}


def nested_state(states: Mapping[str, Any]) -> str | None:
    """Return the name of a state that is a collection of tensors."""
    for name, value in states.items():
        if not isinstance(value, torch.Tensor) and any(isinstance(v, torch.Tensor) and v.numel() > 1 for v in tree_leaves(value)):
            return name
    return None


def differ_clearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether more than a few elements differ by more than rounding could make them."""
    rounding = max(1e-4, 16 * torch.finfo(one.dtype).eps)
    near = torch.isclose(one.float(), other.float(), rtol=rounding, atol=rounding / 10, equal_nan=True)
    return bool((~near).sum() > max(1, one.numel() // 100))


def numbers_that_differ(whole: Trial, others: Sequence[Trial]) -> set[tuple[str, str]]:
    """Return the scalars that differ between trials, such as the norms of pieces."""
    found = [other.numbers() for other in others]
    numbers = whole.numbers()
    return {key for key, value in numbers.items() if not all(_near(value, other.get(key, value)) for other in found)}


def _near(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= 1e-3 * max(abs(one), abs(other)) or (math.isnan(one) and math.isnan(other))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with tensors, such as a learning rate, copied."""
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
