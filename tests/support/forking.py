"""Processes that are forked from one that has imported the libraries, and compiled: a new interpreter imports for seconds."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.multiprocessing as mp
from paths import SUPPORT

PRELOADED = ["torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed", "torch.testing", "zinf_compile"]
"""What they have imported where a device is: after a backward there PyTorch's threads for devices are not forked with it."""
WARM = ["warm"]
"""What they have imported elsewhere: see there."""
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])}
"""That of the process that they are forked from, whichever test is the first: it isn't told where to search for imports."""


def start_forked(target: Callable[..., Any], *args: Any) -> Any:
    """Call `target(*args)` in a process of its own, which a library's `multiprocessing.Process` stands for."""
    context = mp.get_context("forkserver")
    threads = "late" in sys.modules or torch.accelerator.is_available()
    context.set_forkserver_preload(PRELOADED if threads else WARM)
    process = context.Process(target=target, args=args, daemon=True)
    with mock.patch.dict(os.environ, _ENVIRONMENT, clear=True):
        process.start()
    return process


def end_as_a_program(error: BaseException | None = None) -> NoReturn:
    """End this process as an interpreter ends, after an error if there is one, which `multiprocessing` never does.

    The error is printed and noted, what is registered for the exit is called, threads and modules are let go of.
    """
    if error is not None:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    ctypes.pythonapi.Py_Exit(int(error is not None))
    raise AssertionError
