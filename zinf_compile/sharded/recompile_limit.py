"""Dynamo's limit of recompilations: raised for compiled models, and a warning where a function exceeds it."""

from __future__ import annotations

import warnings

import torch

from zinf_compile.runtime.system.process_wide import process_wide

RECOMPILES = 64
"""Variants of a function, where one that Dynamo gives up can't go on: parameters are spread over ranks or off the device."""

_PYTORCHS = 8

_told: set[str] = process_wide(set())


def raise_limit() -> None:
    """Let Dynamo compile a function `RECOMPILES` times, unless the user has set another limit than PyTorch's.

    The limit counts for all frames of the process. Beyond it Dynamo runs a function eagerly, which needs the values.
    """
    if torch._dynamo.config.recompile_limit == _PYTORCHS:
        torch._dynamo.config.recompile_limit = RECOMPILES


def warn_of_eager_frame(frame: str, parameter: str) -> None:
    """Warn, once for each function, that it now runs eagerly on the values of the parameters."""
    if frame not in _told:
        _told.add(frame)
        limit = torch._dynamo.config.recompile_limit
        warnings.warn(
            f"{frame} runs eagerly from now on, on the whole value of {parameter} and others: Dynamo compiled it "
            f"torch._dynamo.config.recompile_limit = {limit} times and gave up. The numbers are right; it is slower, and "
            "needs the memory that eager PyTorch needs. Find what changes from call to call with TORCH_LOGS=recompiles, or "
            "raise torch._dynamo.config.recompile_limit",
            stacklevel=2,
        )
