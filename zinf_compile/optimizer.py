"""Unmodified optimizers on shards: before `step` they are given this rank's part of every partitioned parameter.

The optimizer's own `step` runs on a stand-in: an object of the same class and attributes whose groups hold flat shards instead
of hollow parameters. The optimizer itself is never touched while `step` runs, so an exception inside leaves it usable; state
stays keyed by the parameter, so `state_dict()` works at any time.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .companions import is_averaged
from .errors import UnsupportedOptimizerError
from .gradient import ShardedGradient
from .parameter import ShardedParameter
from .probe import check_elementwise
from .runtime.context import Context
from .runtime.partition import shard_numel
from .runtime.unit import Unit

_STEP_LOCAL = ("param_groups", "state")
_state_bytes: weakref.WeakKeyDictionary[Optimizer, dict[Context, int]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_installed: list[Any] = []


@dataclasses.dataclass(slots=True)
class _StandIn:
    owner: weakref.ref[Optimizer]
    optimizer: Optimizer
    shards: list[tuple[ShardedParameter, torch.Tensor]]


_under_way: dict[int, _StandIn] = {}


def install() -> None:
    """Register the process-wide step hooks, once."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(torch.compiler.disable(_before_step)))
        _installed.append(register_optimizer_step_post_hook(torch.compiler.disable(_after_step)))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if id(optimizer) in _under_way:  # a step that calls super().step()
        return None
    hollow = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]
    if not hollow:
        return None
    check_elementwise(optimizer, next(p._zinf_unit for p in hollow))
    _warn_of_local_gradients(optimizer, hollow[0])
    shards = {p: _like_parameter(p._zinf_unit.shard, p._zinf_unit) for p in hollow}
    stand_in = _make_stand_in(optimizer, shards)
    record = _StandIn(weakref.ref(optimizer), stand_in, list(shards.items()))
    _fill(optimizer, record)
    for stale in [key for key, other in _under_way.items() if other.owner() in (None, optimizer)]:
        del _under_way[stale]  # of a step that raised
    _under_way[id(stand_in)] = record
    args, kwargs = (stand_in, *args[1:]), dict(kwargs)
    if len(args) > 1 and callable(args[1]):
        args = (stand_in, _refreshing(args[1], record), *args[2:])
    if callable(kwargs.get("closure")):
        kwargs["closure"] = _refreshing(kwargs["closure"], record)
    return args, kwargs


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not args or args[0] is optimizer:  # nothing partitioned, or a step called by the stand-in's own: super().step()
        return
    record = _under_way.pop(id(args[0]), None)
    if record is None:
        return
    stand_in = record.optimizer
    for parameter, shard in record.shards:
        state = stand_in.state.pop(shard, None)
        if state is not None:
            optimizer.state[parameter] = {k: _kept_state(v, parameter._zinf_unit) for k, v in state.items()}
        shard.grad = None
        torch.autograd.graph.increment_version(parameter)
    for key, value in stand_in.state.items():
        optimizer.state[key] = value
    for mine, theirs in zip(optimizer.param_groups, stand_in.param_groups, strict=True):
        mine.update({k: v for k, v in theirs.items() if k != "params"})
    for name, value in vars(stand_in).items():
        if name not in _STEP_LOCAL:
            vars(optimizer)[name] = value
    _account(optimizer, record)


def _make_stand_in(optimizer: Optimizer, shards: dict[ShardedParameter, torch.Tensor]) -> Optimizer:
    stand_in: Optimizer = object.__new__(type(optimizer))
    vars(stand_in).update({k: v for k, v in vars(optimizer).items() if k not in _STEP_LOCAL})
    stand_in.param_groups = [
        {**group, "params": [shards[p] if isinstance(p, ShardedParameter) else p for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    stand_in.state = collections.defaultdict(dict)
    return stand_in


def _fill(optimizer: Optimizer, record: _StandIn) -> None:
    partitioned = {id(p) for p, _ in record.shards}
    for key, state in optimizer.state.items():
        if id(key) not in partitioned:
            record.optimizer.state[key] = state
    for parameter, shard in record.shards:
        shard.grad = _local_gradient(parameter)
        if parameter in optimizer.state:
            unit = parameter._zinf_unit
            record.optimizer.state[shard] = {
                k: _shard_state(v, unit, k, optimizer) for k, v in optimizer.state[parameter].items()
            }


def _refreshing(closure: Callable[[], Any], record: _StandIn) -> Callable[[], Any]:
    def call() -> Any:
        loss = closure()
        for parameter, shard in record.shards:
            shard.grad = _local_gradient(parameter)
        return loss

    return call


def _like_parameter(shard: torch.Tensor, unit: Unit) -> torch.Tensor:
    """Give the shard of a parameter without dimensions its shape, so that its state can't be told from eager's."""
    return shard if unit.shape else shard.view(())


def _local_gradient(parameter: ShardedParameter) -> torch.Tensor | None:
    grad = parameter.grad
    if grad is None:
        return None
    unit = parameter._zinf_unit
    return _like_parameter(grad.local() if isinstance(grad, ShardedGradient) else unit.local_part(grad), unit)


def _shard_state(value: Any, unit: Unit, name: str, optimizer: Optimizer) -> Any:
    """Turn a state tensor, whole (from eager steps or a loaded checkpoint) or local, into the flat local one."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    size = shard_numel(unit.numel, unit.context.size)
    if unit.context.size > 1 and value.dim() == 1 and value.numel() == size:
        return value
    if tuple(value.shape) == unit.shape:
        return unit.flat(value) if unit.context.size == 1 else unit.local_part(value)
    raise UnsupportedOptimizerError(
        f"state {name!r} of {type(optimizer).__name__} for parameter {unit.name} has shape {list(value.shape)}; accepted: the "
        f"parameter's {list(unit.shape)}, or this rank's part [{size}] of {unit.context.size} (was it saved with another number "
        "of ranks?)"
    )


def _kept_state(value: Any, unit: Unit) -> Any:
    """Return a state tensor as it is kept between steps: in the parameter's shape where a shard is the whole."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return unit.logical(value) if unit.context.size == 1 and value.numel() == unit.numel else value


def _account(optimizer: Optimizer, record: _StandIn) -> None:
    """Tell the ledger what this optimizer's state takes on this rank."""
    held: dict[Context, int] = collections.defaultdict(int)
    for parameter, _ in record.shards:
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and name != "step":
                held[parameter._zinf_unit.context] += value.numel() * value.element_size()
    if optimizer not in _state_bytes:
        _state_bytes[optimizer] = {}
        weakref.finalize(optimizer, _forget, _state_bytes[optimizer]).atexit = False
    known = _state_bytes[optimizer]
    for context, count in held.items():
        context.ledger.add("states", count - known.get(context, 0))
        known[context] = count


def _forget(known: dict[Context, int]) -> None:
    for context, count in known.items():
        context.ledger.add("states", -count)


def _warn_of_local_gradients(optimizer: Optimizer, example: ShardedParameter) -> None:
    size = example._zinf_unit.context.size
    if size == 1 or optimizer in _warned:
        return
    whole = [p for p in itertools.chain(*(g["params"] for g in optimizer.param_groups)) if not isinstance(p, ShardedParameter)]
    local = [p for p in whole if p.grad is not None and not is_averaged(p)]
    if local:
        _warned.add(optimizer)
        warnings.warn(
            f"{len(local)} parameters of this {type(optimizer).__name__} were never used by a compiled graph (first shape: "
            f"{list(local[0].shape)}): they are not partitioned and their gradients are not averaged over the {size} ranks. "
            "Compile the whole model, or average these gradients yourself",
            stacklevel=3,
        )
