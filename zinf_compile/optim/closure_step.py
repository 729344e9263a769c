"""Steps whose closure partitions the model by its first compiled call: from then on the step runs on shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.sharded.parameter import ShardedParameter

from .record import State, record_of

Closure = Callable[[], Any]


def hollow_of(optimizer: Optimizer) -> list[ShardedParameter]:
    """Return the optimizer's parameters that are partitioned."""
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure that a step was given."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a step's arguments with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def run_on_stand_in(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], fill: Callable[[Optimizer, Closure, Any], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments with which a step runs on a stand-in that shares all attributes with the optimizer.

    Once the closure has partitioned the model, `fill(stand_in, closure, loss)` sets the stand-in up for a partitioned step and
    returns the closure for further calls. Returns None without a closure, since such a step partitions nothing.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        return None
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__ = vars(optimizer)
    record_of(stand_in).state = State.STAND_IN
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
