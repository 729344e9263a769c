"""Probes whether an optimizer updates element by element, by steps on small tensors: whole, and cut in pieces.

Called before the first step and once per set of flags; never touches the user's parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile._torch import tree_leaves
from zinf_compile.errors import UnsupportedOptimizerError
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.wrapping_optimizers import is_wrapper

from .elementwise_trial import (
    TensorSubclassStateError,
    Trial,
    check_kind,
    differ_clearly,
    large_states,
    nested_state,
    numbers_that_differ,
)
from .record import record_of

_SCALES = (1.0, 30.0, 0.03)
"""Scales of the gradients tried; one of them triggers rules that clip by a norm."""

_SMALL, _SMALL_CUT = (4, 16), 32
"""Of the small matrix tried, and the position of the cut: kernels round what is left behind their last full vectors in another
way, such as a power, and both pieces are whole ones of 32 elements."""

_LARGE, _LARGE_CUT = 128, 5000
"""Sides of the large matrix tried: optimizers that quantise states do so from 4,096 elements on. And the position of the cut."""

_STEPS, _AHEAD = 20, 99_980
"""Steps after the first three. Halfway, step counters are advanced by `_AHEAD`, for rules that begin late in training."""

_EXACT = (torch.float32, torch.float64)
"""Types in which an element's update has the same bits in a tensor of any size. On some processors PyTorch's kernels for narrower
ones round what is left behind the last full vector in another way: for these the rule is tried in float32, too."""

_DIFFERENT = "a piece alone is updated differently"

_DECIDING = (bool, str, int, float)
"""Settings that may decide what an optimizer keeps; of a number, whether it is zero (a momentum of SGD, for one)."""

_LR = 0.1
"""Learning rate of the probe: the user's is 0 at first under a schedule with warm-up."""


@dataclasses.dataclass(frozen=True)
class _Verdict:
    problem: str | None
    states: Mapping[str, torch.dtype]
    """States of the parameter's size, with their data types."""
    nested: str | None = None
    """The name of a state that is a collection of tensors."""
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """States besides, such as step counts, as they were after some steps."""


def check_elementwise(optimizer: Optimizer, unit: Unit | ParameterSlot) -> None:
    """Raise `UnsupportedOptimizerError` unless the optimizer works on shards.

    Each optimizer is tried once per set of flags on a 4 x 16 tensor: three steps on the whole must equal, bitwise in float32,
    three steps on two independent flat pieces, as the shards of two ranks are. Further steps, some with step counters far ahead,
    a step on a large matrix, and every number among the states must be equal but for rounding.
    """
    for group in optimizer.param_groups:
        reason = _verdict(optimizer, group, unit.dtype).problem
        if reason is not None:
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} doesn't update element by element ({reason}), so it can't work on parameter "
                f"{unit.name}, which is partitioned. Supported: SGD, Adam, AdamW, NAdam, RMSprop, Adagrad and every other "
                "optimizer whose update of an element depends on that element alone"
            )


def is_elementwise(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return whether the optimizer updates each element of a parameter of this group, of type `dtype`, by that element alone."""
    return _verdict(optimizer, group, dtype).problem is None


def states_kept(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Return the names and types of the states that the optimizer keeps for each element of a parameter of type `dtype`."""
    return _verdict(optimizer, group, dtype).states


def other_states_kept(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the states that the optimizer keeps for a parameter besides, such as step counts, with values of that kind."""
    return _verdict(optimizer, group, dtype).others


def check_pieces(optimizer: Optimizer, group: Mapping[str, Any], unit: Unit) -> None:
    """Raise `UnsupportedOptimizerError` if states can't be cut into pieces, as those of large parameters are."""
    nested = _verdict(optimizer, group, unit.dtype).nested
    if nested is not None:
        raise UnsupportedOptimizerError(
            f"state {nested!r} of {type(optimizer).__name__} is a collection of tensors: parameter {unit.name} is updated piece "
            "by piece, and only states that are tensors can be cut. Keep parameters, gradients and states on the device, without "
            "a master copy"
        )


def _verdict(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> _Verdict:
    verdicts: dict[Hashable, _Verdict] = record_of(optimizer).verdicts
    settings = {k: v for k, v in group.items() if k != "params"}
    key = (dtype, *sorted((k, v if isinstance(v, str) else bool(v)) for k, v in settings.items() if isinstance(v, _DECIDING)))
    if key not in verdicts:
        verdicts[key] = _Verdict(None, {}) if is_wrapper(optimizer) else _try(optimizer, settings, dtype)
    return verdicts[key]


def _try(optimizer: Optimizer, settings: dict[str, Any], dtype: torch.dtype) -> _Verdict:
    keeper = _keeps_parameters(optimizer)
    if keeper is not None:
        return _Verdict(f"it keeps the parameters in its attribute {keeper!r} and works on those, not on its param_groups", {})
    settings = {**settings, **_visible_rate(settings)}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            problem: str | None = None
            if dtype not in _EXACT:
                with contextlib.suppress(Exception):  # a rule for narrow types alone
                    problem = _try_small(optimizer, settings, torch.float32).problem
            verdict = _try_small(optimizer, settings, dtype) if problem is None else _Verdict(problem, {})
            if verdict.problem is None and not _of_pytorch(optimizer):  # last: what decomposes a matrix takes minutes there
                problem = _try_large(optimizer, settings, dtype)
            return verdict if problem is None else _Verdict(problem, {})
        except TensorSubclassStateError as error:
            return _Verdict(str(error), {})
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else "no message"
            return _Verdict(f"on a flat piece it raises {type(error).__name__}: {reason}", {})


def _try_large(optimizer: Optimizer, settings: dict[str, Any], dtype: torch.dtype) -> str | None:
    """Take one step on a large matrix, for which some optimizers keep other states; return the problem."""
    generator = torch.Generator().manual_seed(1)
    value, grad = (torch.randn(_LARGE, _LARGE, generator=generator).to(dtype) for _ in range(2))
    whole = Trial(optimizer, settings, value)
    whole.step(grad)
    if (problem := _other_shape(whole, value)) is not None:
        return problem
    pieces = (slice(0, _LARGE_CUT), slice(_LARGE_CUT, value.numel()))
    parts = [Trial(optimizer, settings, value.view(-1)[piece]) for piece in pieces]
    for part, piece in zip(parts, pieces, strict=True):
        part.step(grad.view(-1)[piece])
    return _DIFFERENT if differ_clearly(whole.value, torch.cat([part.value for part in parts])) else None


def _other_shape(whole: Trial, value: torch.Tensor) -> str | None:
    """Return what is wrong with a state that isn't one number, nor one for each element."""
    for name, state in whole.states.items():
        check_kind(name, state)
        if isinstance(state, torch.Tensor) and state.numel() not in (0, 1, value.numel()):
            return f"its state {name!r}, shape {list(state.shape)}, isn't one number for each element"
    return None


def _try_small(optimizer: Optimizer, settings: dict[str, Any], dtype: torch.dtype) -> _Verdict:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(_SMALL, generator=generator).to(dtype)
    grads = [(torch.randn(_SMALL, generator=generator) * scale).to(dtype) for scale in _SCALES]
    pieces = (slice(0, _SMALL_CUT), slice(_SMALL_CUT, value.numel()))
    whole = Trial(optimizer, settings, value)
    parts = [Trial(optimizer, settings, value.view(-1)[piece]) for piece in pieces]
    taken: list[tuple[int, torch.Tensor]] = []

    def step(grad: torch.Tensor, ahead: int = 0) -> None:
        taken.append((ahead, grad))
        whole.step(grad, ahead)
        for part, piece in zip(parts, pieces, strict=True):
            part.step(grad.view(-1)[piece], ahead)

    def verdict(problem: str | None) -> _Verdict:
        large = large_states(whole.states, value)
        others = {name: state for name, state in whole.states.items() if name not in large}
        return _Verdict(problem, large, nested_state(whole.states), others)

    for grad in grads:
        step(grad)
        if not _of_pytorch(optimizer) and (odd := _other_shape(whole, value)) is not None:
            return verdict(odd)
    together = torch.cat([part.value for part in parts])
    exact, own = dtype in _EXACT, not _of_pytorch(optimizer)
    if (exact and not torch.equal(whole.value, together)) or (own and differ_clearly(whole.value, together)):
        return verdict(_DIFFERENT)
    if _of_pytorch(optimizer):
        return verdict(None)
    with contextlib.suppress(Exception):  # optimizers with a maximum number of steps
        for number in range(_STEPS):
            grad = grads[number % len(grads)]
            step(_across(grad, whole) if number % 4 == 1 else grad, _AHEAD if number == _STEPS // 2 else 0)
            if differ_clearly(whole.value, torch.cat([part.value for part in parts])):
                return verdict(f"{_DIFFERENT}, from some step on")
    different = numbers_that_differ(whole, parts)
    if different:
        again = Trial(optimizer, settings, value)
        with contextlib.suppress(Exception):
            for ahead, grad in taken:
                again.step(grad, ahead)
        different -= numbers_that_differ(whole, [again])  # values that differ between equal runs, such as times
    for where, name in sorted(different):
        return verdict(f"its {where} {name!r} depends on more than one element")
    return verdict(None)


def _across(grad: torch.Tensor, trial: Trial) -> torch.Tensor:
    """Return a gradient with each row orthogonal to the weights, where some matrix optimizers use a different rule."""
    rows = trial.value.view_as(grad).double()
    along = (grad * rows).sum(1, keepdim=True) / (rows * rows).sum(1, keepdim=True)
    return (grad - along * rows).to(grad.dtype)


def _of_pytorch(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is one of PyTorch's own, none of which changes its rule after the first steps."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _keeps_parameters(optimizer: Optimizer) -> str | None:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}  # still whole, if the first step is running
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and any(
            isinstance(leaf, ShardedParameter) or id(leaf) in own for leaf in tree_leaves(value)
        ):
            return name
    return None


def _visible_rate(settings: dict[str, Any]) -> dict[str, Any]:
    rate = settings.get("lr")
    if isinstance(rate, torch.Tensor):
        return {"lr": torch.full_like(rate, _LR)}
    return {"lr": _LR} if isinstance(rate, float | int) else {}
