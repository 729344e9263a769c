"""Steps whose closure partitions the model, at its first compiled call: shards take the parameters' place once it has run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.sharded.parameter import ShardedParameter

Closure = Callable[[], Any]

_entered: weakref.WeakSet[Optimizer] = process_wide(weakref.WeakSet())
"""What stands in for optimizers of which nothing was partitioned when their step began."""


def hollow_of(optimizer: Optimizer) -> list[ShardedParameter]:
    """Return the optimizer's parameters that are partitioned."""
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]


def has_entered(optimizer: Optimizer) -> bool:
    """Say whether it stands in for one in a step of it."""
    return optimizer in _entered


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure that a step was given."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a step's arguments with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def enter(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], fill: Callable[[Optimizer, Closure, Any], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a step run on a stand-in that is the optimizer in everything but identity, until its closure has partitioned it.

    Then `fill(stand_in, closure, loss)` gives the stand-in what a step of a partitioned model works on, and returns the closure
    for further calls. None where there is no closure: such a step has nothing to do with partitioned parameters.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        return None
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__ = vars(optimizer)
    _entered.add(stand_in)
    further: Closure | None = None

    def call() -> Any:
        nonlocal further
        if further is not None:
            return further()
        loss = closure()
        if hollow_of(optimizer):
            further = torch.compiler.disable(fill)(stand_in, closure, loss)
        return loss

    return with_closure((stand_in, *args[1:]), kwargs, call)
