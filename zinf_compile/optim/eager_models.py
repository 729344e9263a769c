"""Models that `torch.compile` was to compile with this backend, and of which Dynamo compiled nothing: found at a step.

Dynamo never calls a backend for a forward that it leaves to eager code, and says nothing. Such a model trains as if it weren't
compiled: whole, and on several ranks each rank by itself. That is an error there, and a warning on one process.
"""

from __future__ import annotations

import itertools
import warnings

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zinf_compile._torch import backends_of
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.unpartitioned import is_averaged, models_of

from .record import record_of

_CHECKED = "compiled"
_MOST_SEARCHES = 32
"""Searches of the process's modules, each of which looks at every object: meta-learning makes an optimizer for each task."""

_CALLER = 6
"""Frames from the warning to the call of `step()`: two of this module, one of hooks, and PyTorch's around these."""

_searches_left = [0]
"""None, until `torch.compile` has asked for the backend."""


def watch_steps() -> None:
    """Check the first step of each optimizer from now on: `torch.compile` has asked for the backend by its name."""
    _searches_left[0] = _MOST_SEARCHES


def check_compiled(optimizer: Optimizer) -> None:
    """Check, once for an optimizer with gradients, that what it trains was compiled, if it was to be.

    Raises `UnsupportedModelError` on several ranks, for they would train apart; else warns.
    """
    if not _searches_left[0] or _CHECKED in record_of(optimizer).warned:
        return
    given = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    trained = [p for p in given if p.grad is not None]
    if not trained:
        return
    if not any(isinstance(p, ShardedParameter) or is_averaged(p) for p in trained):
        _searches_left[0] -= 1
        for model in models_of(trained):
            _check_model(model, type(optimizer).__name__)
    record_of(optimizer).warned.add(_CHECKED)


def _check_model(model: nn.Module, optimizer: str) -> None:
    options = [options for name, options in backends_of(model) if name == "zero_infinity"]
    if not options:
        return
    groups = [given.get("options", given).get("process_group") for given in options]
    size = max(dist.get_world_size(group) for group in groups) if dist.is_initialized() else 1
    recurrent = next((type(module).__name__ for module in model.modules() if isinstance(module, nn.RNNBase)), "")
    reason = f"as one that calls an nn.{recurrent}" if recurrent else "as one with a graph break in a loop"
    way = "set torch._dynamo.config.allow_rnn = True, or call it from a module of your own" if recurrent else ""
    name = type(getattr(model, "_orig_mod", model)).__name__
    found = (
        f'torch.compile(backend="zero_infinity") has compiled nothing of {name} that uses its parameters, before this step of '
        f"{optimizer}: Dynamo left every forward so far to eager code, {reason}, or functional_call() replaced the parameters. "
        "None is partitioned"
    )
    help_ = f"{way or 'let a module of its own have what breaks the graph'}; TORCH_LOGS=graph_breaks names the places"
    if size > 1:
        raise UnsupportedModelError(f"{found}, and no gradient is averaged over the {size} ranks: {help_}")
    warnings.warn(f"{found} or leaves the device, and no cap holds: {help_}", stacklevel=_CALLER)
