"""End of a context before its process ends: threads, process groups, files and memory are given back.

`zinf_compile.reset` calls this. Nothing here waits for other ranks.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch

from zinf_compile._torch import destroy_group, no_torch_function
from zinf_compile.errors import PartitionedParameterError

from .context import Context

_log = logging.getLogger("zinf_compile")

_KEPT = ("rank", "memory", "units", "spoiled", "ending")
"""Attributes that finalizers of tensors and units may still use."""


class ClosedContext:
    """A context that was closed in place: it refuses whatever its holders (parameters, compiled graphs) ask for."""

    closed = True

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PartitionedParameterError(
            "the model was partitioned before zinf_compile.reset(), which let go of its values, gradients and optimizer "
            "states: make the model and its optimizer anew, and load what was saved before (zinf_compile.full_state_dict)"
        )


def close_context(context: Context) -> None:
    """Give back all that a context has, and the values of its units; from then on it is a `ClosedContext`.

    What is under way on this rank ends first. A drive that doesn't answer holds this up for `timeout_s` seconds and is logged.
    """
    context.ending = True
    for unit in list(context.units):
        _empty(unit)
    for lane in context.lanes.threads():
        lane.close()
    context.link.detach(context.lanes.meter)
    engine = context.let_engine_go()
    if engine is not None:
        try:
            engine.close()
        except OSError as error:  # its memory and files stay, for as long as the drive may still use them
            _log.error("the process goes on without %s", error)
    context.memory.staging.clear()
    for group in context.ranks.groups:
        destroy_group(group)
    kept = {name: value for name, value in vars(context).items() if name in _KEPT}
    closed: Any = context
    vars(closed).clear()
    vars(closed).update(kept)
    closed.__class__ = ClosedContext
    kept["memory"].forget_units()


def _empty(unit: Any) -> None:
    """Drop a unit's shard and gradient, wherever they are; its parameter stays hollow."""
    parameter: torch.Tensor | None = unit.parameter()
    if parameter is not None:
        with torch.no_grad(), no_torch_function():
            parameter.grad = None
    unit.empty()
