"""Run ranks as whole processes, to see how each of them ends."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from forking import end_as_a_program, start_forked

DEADLINE_S = 60
"""Far beyond any time-out that the tests set: a rank alive then hangs."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a process ended: its exit code (None: it had to be killed), and the error that its main function raised."""

    exit_code: int | None
    error: str


def endings_of(function: Callable[..., None], size: int, *args: Any) -> list[Ending]:
    """Run `function(rank, size, *args)` as the main program of `size` processes, with gloo; return how they ended.

    What they write to standard error is written to that of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        workers = [start_forked(_main, function, rank, size, folder, args) for rank in range(size)]
        deadline = time.monotonic() + DEADLINE_S
        endings = []
        for rank, worker in enumerate(workers):
            worker.join(timeout=max(0.0, deadline - time.monotonic()))
            code = worker.exitcode
            worker.kill()
            sys.stderr.flush()
            os.write(2, (Path(folder) / f"output of rank {rank}").read_bytes())
            error = Path(folder) / f"error of rank {rank}"
            endings.append(Ending(code, error.read_text() if error.exists() else ""))
    return endings


def _main(function: Callable[..., None], rank: int, size: int, folder: str, args: tuple[Any, ...]) -> NoReturn:
    os.dup2(os.open(Path(folder) / f"output of rank {rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    try:
        function(rank, size, *args)
    except BaseException as error:
        (Path(folder) / f"error of rank {rank}").write_text(f"{type(error).__name__}: {error}")
        end_as_a_program(error)
    end_as_a_program()
