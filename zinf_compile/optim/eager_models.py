"""Models that `torch.compile` was to compile with this backend, and of which Dynamo compiled nothing: found at a step.

Dynamo never calls a backend for a forward that it leaves to eager code, and says nothing. Such a model trains as if it weren't
compiled: whole, and on several ranks each rank by itself. That is an error there, and a warning on one process.
"""

from __future__ import annotations

import itertools
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from zinf_compile._torch import LEAVES_RECURRENT_FORWARDS, own_backends
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.sharded.ordinary import is_used
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.unpartitioned import is_averaged, models_of

from .record import record_of

_CHECKED = "compiled"
_MOST_SEARCHES = 32
"""Searches of the process's modules, each of which looks at every object: meta-learning makes an optimizer for each task. On
several ranks there is no such limit, for they would train apart in silence."""

_CALLER = 7
"""Frames from the warning to the call of `step()`: two of this module, two of hooks, and PyTorch's around these."""

_searches_left = [0]
_asked = [False]
"""Whether `torch.compile` has asked for the backend."""


def watch_steps() -> None:
    """Check the first step of each optimizer from now on: `torch.compile` has asked for the backend by its name."""
    _searches_left[0], _asked[0] = _MOST_SEARCHES, True


def leave_unchecked(optimizer: Optimizer) -> None:
    """Check no step of this optimizer, which trains no model."""
    record_of(optimizer).warned.add(_CHECKED)


def check_compiled(optimizer: Optimizer, *, masters: bool = False) -> None:
    """Check, once for an optimizer with gradients, that what it trains was compiled, if it was to be.

    Raises `UnsupportedModelError` on several ranks, for they would train apart; else warns. A step at a rate of 0 is not the
    first: `torch.distributed.checkpoint` takes such a one to make states. `masters` were loaded, which the step drops.
    """
    if not (_searches_left[0] or (_asked[0] and (masters or _ranks() > 1))) or _CHECKED in record_of(optimizer).warned:
        return
    groups = optimizer.param_groups
    trained = {p for p in itertools.chain.from_iterable(group["params"] for group in groups) if p.grad is not None}
    if not trained or not any(group.get("lr", 1) for group in groups):
        return
    if not any(_is_known(p) for p in trained):
        for model in models_of(list(trained)):
            for module in model.modules():
                if any(name == "zero_infinity" for name, _ in own_backends(module)):
                    _check_module(module, trained, type(optimizer).__name__, masters=masters)
        _searches_left[0] = max(0, _searches_left[0] - 1)
    record_of(optimizer).warned.add(_CHECKED)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _is_known(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, ShardedParameter) or is_averaged(parameter) or is_used(parameter)


def _check_module(module: nn.Module, trained: set[torch.Tensor], optimizer: str, *, masters: bool) -> None:
    """Check a compiled module, part of whose parameters may be trained."""
    parameters = list(module.parameters())
    if trained.isdisjoint(parameters) or any(map(_is_known, parameters)):
        return
    if any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in module.modules()):
        return  # graphs read what it has gathered, never these
    groups = [given.get("options", given).get("process_group") for _, given in own_backends(module)]
    size = max(dist.get_world_size(group) for group in groups) if dist.is_initialized() else 1
    reason, way = _likely_reason(module)
    name = type(getattr(module, "_orig_mod", module)).__name__
    found = (
        f'torch.compile(backend="zero_infinity") has compiled nothing of {name} that uses its parameters, before this step of '
        f"{optimizer}. Where it was not called since it was made, as before a step of gradients that a checkpoint had, call it "
        f"once first, under torch.no_grad(). Dynamo leaves some forwards to eager code, as {reason}; or it is switched off, by "
        "TORCH_COMPILE_DISABLE, set_stance() or its recompile limit; or functional_call() replaced the parameters. None is "
        "partitioned"
    )
    help_ = f"{way}; TORCH_LOGS=graph_breaks names the places"
    if size > 1:
        raise UnsupportedModelError(f"{found}, and no gradient is averaged over the {size} ranks: {help_}")
    drops = ", and the step drops the master copies that were loaded" if masters else ""
    warnings.warn(f"{found} or leaves the device, and no cap holds{drops}: {help_}", stacklevel=_CALLER)


def _likely_reason(module: nn.Module) -> tuple[str, str]:
    """Return which of the forwards that Dynamo leaves to eager code a module's may be, and what to do about it."""
    layers = (type(part).__name__ for part in module.modules() if isinstance(part, nn.RNNBase))
    if LEAVES_RECURRENT_FORWARDS and (recurrent := next(layers, "")):
        return (
            f"one that calls an nn.{recurrent}",
            "call it from a module of your own, or set torch._dynamo.config.allow_rnn = True",
        )
    hooked = next((name for name, part in module.named_modules() if part._backward_hooks or part._backward_pre_hooks), None)
    if hooked:
        return (
            f"one that calls in a loop a module with a backward hook, as {hooked!r}",
            "let the modules of that loop be of a class of your own, and hook these, or hook tensors (register_hook)",
        )
    return "one with a graph break in a loop", "let a module of its own have what breaks the graph"
