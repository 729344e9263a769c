"""Readings of the Python stack: the objects whose methods are running. The only file that reads frames."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def callers() -> Iterator[Any]:
    """Yield the `self` of each method on the stack, innermost first."""
    return (caller for caller, _ in calling_methods())


def calling_methods() -> Iterator[tuple[Any, str]]:
    """Yield the `self` and the name of each method on the stack, innermost first.

    Before Python 3.13 `f_locals` is a snapshot that the frame keeps while the function runs: it would keep alive a model that a
    training loop has dropped. So only methods are read, and their snapshots are cleared.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "self" in code.co_varnames[: code.co_argcount]:
            found = frame.f_locals
            yield found.get("self"), code.co_name
            if type(found) is dict and code.co_flags & inspect.CO_NEWLOCALS:
                found.clear()
            del found
        frame = frame.f_back


_COMPILED = frozenset(
    {
        ("torch._dynamo.eval_frame", "compile_wrapper"),
        ("torch.utils.checkpoint", "recompute_fn"),
        ("torch.utils.checkpoint", "backward"),
    }
)
"""Modules and functions below which runs what is compiled, or what a backward computes again of it. [torch 2.11 to 2.15]"""


_NEAR = 8
"""Frames from a call of an override up to the function of PyTorch's that makes it."""


def inside_compiled_call() -> bool:
    """Return whether this runs in a call of something compiled, or is computed again: what Dynamo left there runs eagerly."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _COMPILED:
            return True
        frame = frame.f_back
    return False


def inside_new_parameter() -> bool:
    """Return whether `nn.Parameter()` is what calls."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None:
            return False
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("torch.nn.parameter", "__new__"):
            return True
        frame = frame.f_back
    return False


def stepping() -> Iterator[Any]:
    """Yield the `self` of each method called `step` on the stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and "self" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            yield _local_of(frame, "self")
        frame = frame.f_back


def _local_of(frame: FrameType, name: str) -> Any:
    found = frame.f_locals
    value = found.get(name)
    if type(found) is dict and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
        found.clear()
    return value
