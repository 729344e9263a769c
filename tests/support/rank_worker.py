"""What a rank's process does with the cases that `ranks.Pool` sends it, and how it is as new for the next one."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from heap import collect_less, settle
from quick_compile import compile_quickly

import zinf_compile

_ACCEPTED = (
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.jit.script_method` is deprecated",
    ".*its drive has not answered for",
)
"""Warnings, see pyproject.toml; the last is of a drive that other work keeps busy."""

_CONFIGS = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that all ranks call, `function(rank, size, *args)`."""

    function: Callable[..., Any]
    size: int
    args: tuple[Any, ...]
    rendezvous: str
    """The file by which the ranks find each other."""
    timeout_s: float
    backend: str = "gloo"
    """The process group's; "late" is that of the device for tests, which the process then has."""


def work(connection: Connection) -> None:
    """Run one case after the other, until the connection is closed. Each is answered twice: by what it returned, and "ready"."""
    before = _Process()
    settle()
    collect_less()
    try:
        while True:
            case, rank = connection.recv()
            _answer(connection, case, rank)
            del case
            _clear_away()
            before.restore()
            left = [thread.name for thread in threading.enumerate() if thread.name.startswith("zinf")]
            connection.send((f"threads are left: {left}" if left else "", "ready"))
    except (EOFError, ConnectionError):  # the session is over
        os._exit(0)


def run_once(connection: Connection) -> None:
    """Run one case, and end."""
    settle()
    collect_less()
    _answer(connection, *connection.recv())
    os._exit(0)  # without what a program does at its end: other ranks may be gone


def _answer(connection: Connection, case: Case, rank: int) -> None:
    """Run a case, and tell what came of it; after an error the process ends, so that no other rank waits for it."""
    compile_quickly()
    torch.set_num_threads(1)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for accepted in _ACCEPTED:
        warnings.filterwarnings("ignore", accepted)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.size))
    try:
        if case.backend == "late":
            importlib.import_module("late.process_group")  # it registers itself, where this process has the device
        dist.init_process_group(
            case.backend,
            init_method=f"file://{case.rendezvous}",
            rank=rank,
            world_size=case.size,
            timeout=datetime.timedelta(seconds=case.timeout_s),
        )
        value = case.function(rank, case.size, *case.args)
    except BaseException:
        connection.send((traceback.format_exc(), None))
        os._exit(1)
    connection.send(("", value))
    del value
    try:
        dist.barrier()  # nobody closes a connection that another rank still reads
    except Exception:  # a rank that failed is gone
        os._exit(1)


def _clear_away() -> None:
    """Let go of everything that a case has made."""
    zinf_compile.reset()
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate" in sys.modules:
        states = sys.modules["accelerate.state"]
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()
    settle()


class _Process:
    """What a case may change of a process, as it was before the first."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._random = torch.get_rng_state()
        self._configs = [config.get_config_copy() for config in _CONFIGS]
        self._globals = {
            name: dict(vars(module)) for name, module in list(sys.modules.items()) if name.split(".")[0] == "zinf_compile"
        }
        self._log = logging.getLogger("zinf_compile")
        self._logging = self._log.level, list(self._log.handlers), self._log.propagate

    def restore(self) -> None:
        """Make it so again."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        torch.set_rng_state(self._random)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        for config, saved in zip(_CONFIGS, self._configs, strict=True):
            for key, value in config.get_config_copy().items():
                if key in saved and value != saved[key]:
                    setattr(config, key, saved[key])
        for name, values in self._globals.items():  # constants that a case made smaller
            now = vars(sys.modules[name])
            now.update({key: value for key, value in values.items() if now.get(key) is not value})
        self._log.level, self._log.handlers, self._log.propagate = self._logging[0], list(self._logging[1]), self._logging[2]
        if hasattr(sys, "last_value"):
            del sys.last_value
