"""Tell optimizers that update element by element from those that need whole matrices."""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ._torch import tree_leaves
from .errors import UnsupportedOptimizerError
from .parameter import ShardedParameter
from .program import Slot
from .runtime.unit import Unit

_SCALES = (1.0, 30.0, 0.03)
"""Of the gradients of the steps tried: rules that clip by a norm show themselves at one of them."""

_DECIDING = (bool, str, int, float)
"""Settings that may decide what an optimizer keeps; of a number, whether it is zero (a momentum of SGD, for one)."""

_LR = 0.1
"""Tried in place of the user's: under a schedule with warm-up that one is 0 at first, and no rule shows itself."""


@dataclasses.dataclass(frozen=True)
class _Verdict:
    problem: str | None
    states: Mapping[str, torch.dtype]
    """What the optimizer keeps of the size of the parameter."""


_verdicts: weakref.WeakKeyDictionary[Optimizer, dict[tuple[Any, ...], _Verdict]] = weakref.WeakKeyDictionary()


def check_elementwise(optimizer: Optimizer, unit: Unit | Slot) -> None:
    """Raise `UnsupportedOptimizerError` unless the optimizer works on shards.

    Each optimizer is tried once per set of flags on a 6 x 8 tensor: three steps on the whole must equal, bitwise, three steps on
    two flat pieces that know nothing of each other, as the shards of two ranks don't.
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
    """Say whether the optimizer updates each element of a parameter of this group, of type `dtype`, by that element alone."""
    return _verdict(optimizer, group, dtype).problem is None


def states_kept(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Return the names and types of the states that the optimizer keeps for each element of a parameter of type `dtype`."""
    return _verdict(optimizer, group, dtype).states


def _verdict(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> _Verdict:
    verdicts = _verdicts.setdefault(optimizer, {})
    settings = {k: v for k, v in group.items() if k != "params"}
    key = (dtype, *sorted((k, v if isinstance(v, str) else bool(v)) for k, v in settings.items() if isinstance(v, _DECIDING)))
    if key not in verdicts:
        verdicts[key] = _try(optimizer, settings, dtype)
    return verdicts[key]


def _try(optimizer: Optimizer, settings: dict[str, Any], dtype: torch.dtype) -> _Verdict:
    keeper = _keeps_parameters(optimizer)
    if keeper is not None:
        return _Verdict(f"it keeps the parameters in its attribute {keeper!r} and works on those, not on its param_groups", {})
    settings = {**settings, **_visible_rate(settings)}
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(6, 8, generator=generator).to(dtype)
    grads = [(torch.randn(6, 8, generator=generator) * scale).to(dtype) for scale in _SCALES]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            whole, states = _run(optimizer, settings, value, grads)
            parts = [
                _run(optimizer, settings, value.view(-1)[piece], [g.view(-1)[piece] for g in grads])[0]
                for piece in (slice(0, 24), slice(24, 48))
            ]
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else "no message"
            return _Verdict(f"on a flat piece it raises {type(error).__name__}: {reason}", {})
    return _Verdict(None if torch.equal(whole.view(-1), torch.cat(parts)) else "a piece alone is updated differently", states)


def _keeps_parameters(optimizer: Optimizer) -> str | None:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}  # not hollow yet, if their step is under way
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


def _run(
    optimizer: Optimizer, settings: dict[str, Any], value: torch.Tensor, grads: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.dtype]]:
    parameter = torch.nn.Parameter(value.clone())
    trial: Optimizer = object.__new__(type(optimizer))
    hidden = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "step")
    vars(trial).update({k: v for k, v in vars(optimizer).items() if k not in hidden})
    vars(trial).pop("grad_scale", None)
    vars(trial).pop("found_inf", None)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = (
        collections.OrderedDict(),
        collections.OrderedDict(),
    )
    trial.param_groups = [{**copy.deepcopy(_plain(settings)), "params": [parameter]}]
    trial.state = collections.defaultdict(dict)
    _own_constructor_state(optimizer, trial, parameter)
    for grad in grads:
        parameter.grad = grad.clone()
        trial.step()
    kept = {k: v.dtype for k, v in trial.state[parameter].items() if isinstance(v, torch.Tensor) and v.numel() == value.numel()}
    return parameter.detach(), kept


def _own_constructor_state(optimizer: Optimizer, trial: Optimizer, parameter: torch.nn.Parameter) -> None:
    """Give the trial the state that classes such as Adagrad make in their constructor."""
    try:
        fresh = type(optimizer)([parameter], **{k: v for k, v in optimizer.defaults.items() if k in _signature(optimizer)})
    except Exception:  # a constructor that wants more: most keep no state there
        return
    if fresh.state:
        trial.state = fresh.state


def _signature(optimizer: Optimizer) -> set[str]:
    return set(inspect.signature(type(optimizer).__init__).parameters)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with tensors (a learning rate may be one) detached, so that the trial can't change the user's."""
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
